"""Whether all that a step waits for on behalf of other ranks is seen."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.config.parallel import Parallel
from lockstep.config.world import ParallelDims
from lockstep.parallel.parallel_model import ParallelModel


def is_seen(
    world_size: int, axes: ParallelDims, parallel: Parallel, models: Sequence[ParallelModel], device: str
) -> bool:
    """Return whether all that the main thread waits for in a step, on behalf of other ranks, is in ``communication``.

    Seen are DDP's end of a backward, on every kind of device; and on CPUs what models that are sharded, or split by
    ``tp``, ``cp`` or ``ep``, send. Not seen are pipelines, what an accelerator waits for by itself, and FSDP2's
    collectives in other forms.
    """
    if world_size == 1:
        return True
    if axes.pp > 1 or not models:
        return False
    return all(model.communication_is_timed(parallel, axes, device) for model in models)
