"""Names that scripts import from ``accelerate.utils.random``."""

from lockstep.runtime.seed import set_seed, synchronize_rng_states

__all__ = ["set_seed", "synchronize_rng_states"]
