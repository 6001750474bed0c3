"""The buffers of each of several ranks, where one process stands for all."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.parallel.parallel_model import ParallelModel

Buffers = dict[str, Tensor]
"""By name in one model."""


class RankBuffers:
    """The buffers of each rank, in models that have those of one rank at a time.

    Ranks start with equal buffers, and each changes its own, as batch normalisation does by its batches. If they are
    broadcast, all ranks take rank 0's in the first forward of a step.
    """

    def __init__(self, ranks: int) -> None:
        self._broadcasts: dict[ParallelModel, bool] = {}
        self._of_ranks: list[dict[ParallelModel, Buffers]] = [{} for _ in range(ranks)]
        self._rank = 0

    def share(self, model: ParallelModel, broadcasts: bool) -> None:
        """Follow a model, whose buffers are those of all ranks now."""
        self._broadcasts[model] = broadcasts
        values = _read(model, {})
        for buffers in self._of_ranks:
            buffers[model] = values

    def turn(self, rank: int) -> None:
        """Let the next batch be one of ``rank``."""
        buffers = self._of_ranks[self._rank]
        for model, known in buffers.items():
            buffers[model] = _read(model, known)
        self._rank = rank
        for model, values in self._of_ranks[rank].items():
            _load(model, values)

    def stepped(self) -> None:
        """Note that an optimizer has made a step. An evaluation, and what is compared, has rank 0's buffers."""
        self.turn(0)
        for buffers in self._of_ranks[1:]:
            for model, broadcasts in self._broadcasts.items():
                buffers[model] = self._of_ranks[0][model] if broadcasts else buffers[model]


def _read(model: ParallelModel, known: Buffers) -> Buffers:
    """Return the buffers that a model has now. What has not changed since they were ``known`` takes no more memory."""
    found = {}
    for name, buffer in model.plain.named_buffers():
        before = known.get(name)
        found[name] = before if before is not None and _equal(before, buffer) else buffer.detach().clone()
    return found


@torch.no_grad()
def _load(model: ParallelModel, values: Buffers) -> None:
    for name, buffer in model.plain.named_buffers():
        value = values.get(name)
        # What is equal is not written to: a graph may wait for its backward with it.
        if value is not None and value.shape == buffer.shape and not _equal(value, buffer):
            buffer.copy_(value)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
