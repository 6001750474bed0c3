"""Whether all that the main thread waits for in a step, on behalf of other ranks, is seen."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.config.parallel import Parallel
from lockstep.config.world import ParallelDims
from lockstep.parallel.parallel_model import ParallelModel, ReplicatedModel, ShardedModel
from lockstep.runtime.step import StepClock


def watch_collectives(model: ParallelModel, clock: StepClock) -> None:
    """Let the clock learn when this model's own collectives are waited for."""
    for sharding in model.shardings:
        for collective in sharding.collectives:
            collective.clock = clock


def is_seen(world_size: int, axes: ParallelDims, parallel: Parallel, models: Sequence[ParallelModel]) -> bool:
    """Seen is the end of DDP's backward; and of models that are sharded, on CPUs, each gather and each reduction.

    Not seen are collectives within a forward that is split (tp, cp, pp, ep), those that an accelerator waits for by
    itself, and those of FSDP2 in other forms.
    """
    if world_size == 1:
        return True
    if axes.splits_model or axes.ep > 1 or not models:
        return False
    return all(_is_seen(model, axes, parallel) for model in models)


def _is_seen(model: ParallelModel, axes: ParallelDims, parallel: Parallel) -> bool:
    if isinstance(model, ShardedModel):
        from lockstep.parallel.zero.exchange import MOST_RANKS  # it has brought FSDP2 already

        is_plain = not (parallel.quantized_weights or parallel.quantized_gradients)
        is_ours = all(sharding.collectives for sharding in model.shardings)
        return is_ours and is_plain and axes.replicate == 1 and axes.shard <= MOST_RANKS
    return isinstance(model, ReplicatedModel)
