"""Dispatch: rank 0 alone reads, and every rank receives its batch of each round."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from lockstep.comm.collectives import Communicator
from lockstep.comm.functional import slice_tensors
from lockstep.comm.tree import leaves, map_tensors
from lockstep.data.batch_sharding import unpadded
from lockstep.data.readers import GlobalBatches, ReadRound, row_count
from lockstep.errors import LockstepError, UsageError


class Announcement(NamedTuple):
    """What rank 0 says before each round: a skeleton of its batches and the round, else the end, or its error."""

    skeleton: object = None
    round: ReadRound | None = None
    error: str = ""


def dispatched(
    source: GlobalBatches | None,
    communicator: Communicator,
    rank: int,
    device: torch.device,
    move: Callable[[list[object]], list[object]],
    cut: int,
) -> GlobalBatches:
    """Yield this rank's batch of each round, on ``device``, to which ``move`` moves what is read.

    ``source`` is a reader for all ranks on rank 0 and None elsewhere; where it reads one batch for all of them,
    ``cut`` is the number of ranks that get its rows, else 1. Every ``next`` is a collective call, so all ranks must
    iterate in step.

    Raises:
        LockstepError: on the other ranks, when reading fails on rank 0, which raises the original.
    """
    while True:
        parts: list[object] = []
        announcement = Announcement()
        failure: Exception | None = None
        if source is not None:
            try:
                parts, announcement = _next_round(source, move, cut)
            except Exception as error:
                failure = error
                announcement = Announcement(error=f"{type(error).__name__}: {error}")
        # Rank 0 raises only behind it, because all others wait in it.
        announcement = communicator.broadcast_object_list([announcement], from_process=0)[0]
        if failure is not None:
            raise failure
        if announcement.error:
            raise LockstepError(
                f"Rank 0, which reads the data for all ranks, failed with {announcement.error}. Look at the "
                "traceback of rank 0, or use dispatch_batches=False so that every rank reads its own data."
            )
        if announcement.round is None:
            return
        parts = _share(parts, announcement.skeleton, communicator, device)
        yield [parts[rank]], announcement.round


def _next_round(
    source: GlobalBatches, move: Callable[[list[object]], list[object]], cut: int
) -> tuple[list[object], Announcement]:
    following = next(source, None)
    if following is None:
        return [], Announcement()
    batches, this = following
    if cut > 1:
        batches = _rows_of_ranks(batches[0], cut)
        this = this._replace(counts=unpadded((row_count(batches[0]) or 0,) * cut))
    parts = move(list(batches))
    # Meta tensors have a shape and a dtype but no data: the skeleton is all that must be pickled.
    skeleton = map_tensors(lambda tensor: tensor.to("meta"), parts)
    return parts, Announcement(skeleton, this)


def _rows_of_ranks(batch: object, ranks: int) -> list[object]:
    """Return the batch cut into as many equal parts as there are ranks."""
    rows = {
        len(leaf) if isinstance(leaf, torch.Tensor) and leaf.ndim else None for leaf in leaves(batch).values()
    }
    size = rows.pop() if len(rows) == 1 else None
    if size is None or size % ranks:
        raise UsageError(
            f"split_batches=True cuts each batch of this loader (batch_size=None) into {ranks} equal parts, but one "
            + ("is not made of tensors with equally many rows" if size is None else f"has {size} rows")
            + f". Make batches of tensors whose rows {ranks} divides, or use split_batches=False."
        )
    part = size // ranks
    return [slice_tensors(batch, slice(rank * part, (rank + 1) * part)) for rank in range(ranks)]


def _share(
    parts: list[object], skeleton: object, communicator: Communicator, device: torch.device
) -> list[object]:
    """Return the parts of rank 0 on every rank: its tensors are broadcast, the rest is in the skeleton."""
    tensors = [leaf for leaf in leaves(parts or skeleton).values() if isinstance(leaf, torch.Tensor)]
    if parts:
        tensors = [tensor.contiguous() for tensor in tensors]
    else:
        tensors = [torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in tensors]
    if tensors:
        tensors = list(communicator.broadcast(tensors, from_process=0))
    received = iter(tensors)
    rebuilt: list[object] = map_tensors(lambda _: next(received), skeleton)
    return rebuilt
