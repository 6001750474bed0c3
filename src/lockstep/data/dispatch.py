"""Dispatch: rank 0 alone reads, and every rank receives its batch of each round."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from lockstep.comm.collectives import Communicator
from lockstep.comm.tree import leaves, map_tensors
from lockstep.data.readers import GlobalBatches, ReadRound
from lockstep.errors import LockstepError


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
) -> GlobalBatches:
    """Yield this rank's batch of each round, on ``device``, to which ``move`` moves what is read.

    ``source`` is a reader for all ranks on rank 0 and None elsewhere. Every ``next`` is a collective call, so all ranks
    must iterate in step.

    Raises:
        LockstepError: on the other ranks, when reading fails on rank 0, which raises the original.
    """
    while True:
        parts: list[object] = []
        announcement = Announcement()
        failure: Exception | None = None
        if source is not None:
            try:
                parts, announcement = _next_round(source, move)
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
    source: GlobalBatches, move: Callable[[list[object]], list[object]]
) -> tuple[list[object], Announcement]:
    following = next(source, None)
    if following is None:
        return [], Announcement()
    batches, this = following
    parts = move(list(batches))
    # Meta tensors have a shape and a dtype but no data: the skeleton is all that must be pickled.
    skeleton = map_tensors(lambda tensor: tensor.to("meta"), parts)
    return parts, Announcement(skeleton, this)


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
