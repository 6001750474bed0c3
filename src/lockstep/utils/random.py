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
    """Give every rank the state that one random number generator has on rank 0. Call it on every rank.

    Args:
        rng_type: The name of the generator, as in ``synchronize_rng_states``. None: nothing happens.
        generator: The generator that ``"generator"`` means.

    Raises:
        ConfigError: the name is unknown, or this machine does not have the device.
        UsageError: ``rng_type`` is ``"generator"``, but no ``generator`` was passed.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.utils import gather, synchronize_rng_state

        accelerator = Accelerator()
        torch.manual_seed(accelerator.process_index)
        synchronize_rng_state("torch")
        drawn = gather(torch.rand(1))
        assert (drawn == drawn[0]).all()
        ```
    """
    synchronize_rng_states([] if rng_type is None else [rng_type], generator)
