"""How many ranks each axis of the mesh has: the arithmetic of ``parallel`` and the world size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lockstep.config.parallel import Parallel
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
        """The place of ``rank`` among those with batches of their own."""
        return rank // (self.cp * self.tp) % self.data


def axes_of(parallel: Parallel, world_size: int) -> ParallelDims:
    """The sizes for a world.

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
