"""Whether a number of processes fits what was asked for: the axes of the mesh, and the sizes of batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from lockstep.config.enums import Strategy
from lockstep.config.parallel import Parallel
from lockstep.config.values import SettingValue
from lockstep.errors import ConfigError


@dataclass(frozen=True)
class ParallelDims:
    """The mesh pp x replicate x shard x cp x tp, outermost first: ranks that differ in tp alone are neighbours.

    A rank's data are those of its place on replicate x shard. ``ep`` ranks that share experts are neighbours among
    these. Without ZeRO ``shard`` is 1.
    """

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @cached_property
    def data(self) -> int:
        """Ranks with batches of their own."""
        return self.replicate * self.shard

    @cached_property
    def splits_model(self) -> bool:
        """Whether ranks share the work on one batch."""
        return self.pp * self.cp * self.tp > 1

    @cached_property
    def divides_weights(self) -> bool:
        """Whether ranks hold different weights between a forward and a backward too."""
        return self.pp * self.tp * self.ep > 1

    def data_rank(self, rank: int) -> int:
        """Return the place of ``rank`` among those with batches of their own."""
        # Ranks count with tp fastest, then cp, shard, replicate and pp.
        return rank // (self.cp * self.tp) % self.data


def axes_of(parallel: Parallel, world_size: int) -> ParallelDims:
    """Return the sizes for a world.

    Raises:
        ConfigError: it cannot be divided this way; the message has the arithmetic.
    """
    each = parallel.pp * parallel.cp * parallel.tp
    if world_size % each:
        factors = " x ".join(f"{axis}={getattr(parallel, axis)}" for axis in ("pp", "cp", "tp"))
        raise ConfigError(
            f"parallel='{parallel}' spreads one model over {each} processes ({factors}), but there are {world_size} "
            f"({world_size} / {each} is not whole). Start a multiple of {each} processes, or change the product."
        )
    data = world_size // each
    if data % parallel.ep:
        raise ConfigError(
            f"parallel='{parallel}' spreads experts over ep={parallel.ep} ranks with own batches, but there are "
            f"{data} such ranks ({data} / {parallel.ep} is not whole). Set ep to a divisor of {data}."
        )
    shard = parallel.shard_size(world_size)  # with cp, parameters are sharded over the sequence's ranks too
    if not parallel.shards:
        return ParallelDims(parallel.pp, data, 1, parallel.cp, parallel.tp, parallel.ep)
    replicate = parallel.replicate if world_size > 1 else 1
    return ParallelDims(parallel.pp, replicate, shard // parallel.cp, parallel.cp, parallel.tp, parallel.ep)


BATCH_SETTINGS = ("train_batch_size", "micro_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True)
class BatchSizes:
    """``micro``: rows of a process's batch; ``accumulation``: batches in a step; ``train``: rows of a step over all.

    None: not said. ``sources`` are for messages.
    """

    train: int | None = None
    micro: int | None = None
    accumulation: int | None = None
    sources: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Mapping[str, SettingValue]) -> BatchSizes:
        """Read the batch sizes from the settings that were said."""
        given = [settings[name] for name in BATCH_SETTINGS if name in settings]
        train, micro, accumulation = (
            settings[name].value if name in settings else None for name in BATCH_SETTINGS
        )
        return cls(train, micro, accumulation, tuple(item.source for item in given))

    def solved(self, world_size: int, ranks: str = "processes") -> BatchSizes:
        """Fill in what follows for so many processes, which messages call ``ranks``; what does not follow stays None.

        Raises:
            ConfigError: the numbers do not fit; the message has the arithmetic.
        """
        train, micro, accumulation = self.train, self.micro, self.accumulation
        if train is None:
            return self
        if micro is None:
            accumulation = accumulation or 1
            micro = train // (accumulation * world_size)
        elif accumulation is None:
            accumulation = train // (micro * world_size)
        # A quotient may have been rounded: the product finds it.
        product = micro * accumulation * world_size
        if product != train:
            raise ConfigError(self._message(world_size, ranks))
        return BatchSizes(train, micro, accumulation, self.sources)

    def _message(self, world_size: int, ranks: str) -> str:
        known = [
            f"{value} {what}"
            for value, what in (
                (self.micro, "rows a process"),
                (self.accumulation or (None if self.micro else 1), "accumulation steps"),
                (world_size, ranks),
            )
            if value is not None
        ]
        divisor = (self.micro or 1) * (self.accumulation or 1) * world_size
        arithmetic = " x ".join(known) + f" = {divisor}"
        if self.micro is None or self.accumulation is None:
            relation = f"{self.train} does not divide by {arithmetic}"
        else:
            relation = f"{arithmetic}, not {self.train}"
        return (
            f"the batch sizes do not fit: {', '.join(self.sources)}; {relation}. "
            "Correct one of them, or set it to 'auto'."
        )


def fitted(parallel: Parallel, batch: BatchSizes, world_size: int) -> BatchSizes:
    """Return the batch sizes that follow for ``world_size`` processes: the same check for a launch and for a worker.

    Raises:
        ConfigError: the processes cannot be divided as ``parallel`` says, or the batch sizes do not fit them.
    """
    if parallel.strategy is Strategy.DATA_PARALLEL and world_size > 1:
        raise ConfigError(
            f"parallel='dataparallel' is for one process, but {world_size} were started. Start one "
            "process, or drop dataparallel to train with DistributedDataParallel."
        )
    parallel.check_offload(world_size)
    axes = axes_of(parallel, world_size)
    return batch.solved(axes.data, "processes with rows of their own" if axes.splits_model else "processes")
