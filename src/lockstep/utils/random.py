"""Names that scripts import from ``accelerate.utils.random``."""

from __future__ import annotations

import torch

from lockstep.config.enums import RNGType
from lockstep.runtime.seed import set_seed, synchronize_rng_states
from lockstep.utils.constants import CUDA_DISTRIBUTED_TYPES

__all__ = ["CUDA_DISTRIBUTED_TYPES", "set_seed", "synchronize_rng_state", "synchronize_rng_states"]


def synchronize_rng_state(
    rng_type: RNGType | str | None = None, generator: torch.Generator | None = None
) -> None:
    """``synchronize_rng_states`` of one generator."""
    synchronize_rng_states([] if rng_type is None else [rng_type], generator)
