"""Whether the words of ``parallel`` and the batch sizes fit a number of processes."""

from __future__ import annotations

from lockstep.config.axes import axes_of
from lockstep.config.batch import BatchSizes
from lockstep.config.enums import Strategy
from lockstep.config.parallel import Parallel
from lockstep.errors import ConfigError


def fitted(parallel: Parallel, batch: BatchSizes, world_size: int) -> BatchSizes:
    """The batch sizes that follow for ``world_size`` processes: the same check for a launch and for a worker.

    Raises:
        ConfigError: the processes cannot be divided as ``parallel`` says, or the batch sizes do not fit them.
    """
    if parallel.strategy is Strategy.DATA_PARALLEL and world_size > 1:
        raise ConfigError(
            f"parallel='dataparallel' is for one process, but {world_size} were started. "
            "Start one process, or drop the word: several processes use DistributedDataParallel."
        )
    parallel.check_offload(world_size)
    axes = axes_of(parallel, world_size)
    return batch.solved(axes.data, "processes with rows of their own" if axes.splits_model else "processes")
