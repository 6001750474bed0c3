"""What each of several ranks would have, where one process stands for all: buffers, batches, gradients.

The process has one rank's buffers in its models at a time. Ranks start with equal buffers, and each changes its own, as
batch normalisation does by its batches. Some ways to spread a model give all ranks those of rank 0 before some
forwards. Where it is known before which, every rank's buffers are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.data.loader import PreparedLoader
from lockstep.data.worker_states import TellingCollate
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parity.trace.sketch import row_sketch

Buffers = dict[str, Tensor]
"""By name in one model."""


class BufferBroadcast(Enum):
    """Before which forwards all ranks take the buffers of rank 0."""

    AFTER_AVERAGE = "DDP: those that follow a forward whose gradients are averaged"
    WITH_AVERAGE = "ZeRO, and models that are split: those whose gradients are averaged"
    NEVER = "none"
    UNKNOWN = "some"


class Sharing(NamedTuple):
    """Of one model. ``is_shared``: which of its buffers a broadcast is of."""

    broadcast: BufferBroadcast
    is_shared: Callable[[str], bool] = lambda name: True


class RankBuffers:
    """Of all models that are trained. ``ranks``: how many have turns in this process."""

    def __init__(self, ranks: int) -> None:
        self._sharing: dict[ParallelModel, Sharing] = {}
        self._of_ranks: list[dict[ParallelModel, Buffers]] = [{} for _ in range(ranks)]
        self._rank = 0
        self._calls: Counter[ParallelModel] = Counter()
        self._of_first: dict[tuple[ParallelModel, int], Buffers | None] = {}
        self._averaged: dict[ParallelModel, bool] = {}
        self._averages: dict[ParallelModel, bool] = {}

    def share(self, model: ParallelModel, sharing: Sharing) -> None:
        """How ranks share the buffers of a model, which all of them have as they are when this is first told."""
        self._sharing[model] = sharing
        if model not in self._of_ranks[0]:
            values = _read(model, {})
            for buffers in self._of_ranks:
                buffers[model] = values

    def turn(self, rank: int) -> None:
        """The next batch is one of ``rank``."""
        self._save()
        self._rank = rank
        self._calls.clear()
        if rank == 0:
            self._of_first.clear()
        for model, values in self._of_ranks[rank].items():
            _load(model, values)

    def forward_begins(self, model: ParallelModel, averages: bool) -> None:
        """A model is called. ``averages``: gradients of this forward are averaged over the ranks."""
        call = self._calls[model]
        self._calls[model] += 1
        broadcast, is_shared = self._sharing[model]
        if self._rank == 0:
            is_taken = averages
            if broadcast is not BufferBroadcast.WITH_AVERAGE:
                # DDP broadcasts in the forward after one whose gradients it averages, and in the first.
                is_taken = self._averaged.get(model, True)
            self._averaged[model] = self._averages[model] = averages
            now = _read(model, self._of_ranks[0][model])
            self._of_first[model, call] = now if is_taken and broadcast is not BufferBroadcast.NEVER else None
            return
        taken = self._of_first.get((model, call))
        if taken is not None:
            _load(model, {name: value for name, value in taken.items() if is_shared(name)})

    def stepped(self) -> None:
        """An optimizer has made a step: the gradients of the forward before it were averaged."""
        self._averaged.clear()
        # An evaluation uses rank 0's buffers.
        self.turn(0)

    def of_ranks(self, model: ParallelModel) -> Mapping[int, Buffers]:
        """The buffers of each rank of which they are known."""
        self._save()
        broadcast = self._sharing[model].broadcast
        # A window that the end of an epoch cuts short averages in a forward that only its ranks know of.
        is_cut = broadcast is BufferBroadcast.WITH_AVERAGE and not self._averages.get(model, True)
        buffers = self._of_ranks[:1] if is_cut or broadcast is BufferBroadcast.UNKNOWN else self._of_ranks
        return {rank: of_rank[model] for rank, of_rank in enumerate(buffers)}

    def _save(self) -> None:
        """Take note of the buffers of the rank that has its turn."""
        buffers = self._of_ranks[self._rank]
        for model, known in buffers.items():
            buffers[model] = _read(model, known)


def _read(model: ParallelModel, known: Buffers) -> Buffers:
    """The buffers that a model has now. What has not changed since they were ``known`` takes no more memory."""
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


class RankBatches(NamedTuple):
    """A global batch, and what each rank has of it; ``of_ranks`` is empty where its rows do not go round."""

    whole: Any
    of_ranks: tuple[object, ...]


class CollateForRanks:
    """``collate``, for a global batch and for the rows of each of so many ranks.

    A rank that pads its rows to the longest of them has other tensors than a slice of the padded global batch.
    """

    def __init__(self, collate: Callable[[Any], Any], ranks: int) -> None:
        self._collate = collate
        self._ranks = ranks

    def __call__(self, rows: object) -> RankBatches:
        # The dataset makes whole batches, in a form of its own.
        if not isinstance(rows, list):
            return RankBatches(self._collate(rows), ())
        each, left = divmod(len(rows), self._ranks)
        starts = range(0, 0 if left else len(rows), max(each, 1))
        return RankBatches(
            self._collate(rows), tuple(self._collate(rows[start : start + each]) for start in starts)
        )


def collate_for_ranks(loader: PreparedLoader, ranks: int) -> None:
    """Have a loader of map-style data hand over ``RankBatches``; others hand over whole batches as before."""
    inner = loader.inner
    if inner.batch_sampler is None:
        return
    if isinstance(inner.collate_fn, TellingCollate):
        inner.collate_fn.collate = CollateForRanks(inner.collate_fn.collate, ranks)
    else:
        inner.collate_fn = CollateForRanks(inner.collate_fn, ranks)


SAME = 1e-3
"""Relative distance up to which a gradient is the sum of what the ranks' batches have added."""


class RankGradients:
    """Of all parameters that are watched, as sketches: of a matrix 8 numbers a row.

    Args:
        whose: Tells the rank whose turn it is.
    """

    def __init__(self, ranks: int, whose: Callable[[], int]) -> None:
        self._ranks = ranks
        self._whose = whose
        self._found: dict[str, dict[int, Tensor]] = {}

    def watch(self, name: str, parameter: Tensor) -> None:
        """Take note of each gradient that a backward brings to a parameter."""
        if parameter.requires_grad and not parameter.is_meta:
            parameter.register_hook(partial(self._add, name))

    def _add(self, name: str, gradient: Tensor) -> None:
        of_ranks, rank, more = self._found.setdefault(name, {}), self._whose(), row_sketch(gradient)
        # Sketches are linear: those of accumulated gradients add up as the gradients do.
        of_ranks[rank] = of_ranks[rank] + more if rank in of_ranks else more

    def of_ranks(self, name: str, gradient: Tensor) -> Iterator[Tensor]:
        """Sketches of the gradients that each rank has before they are averaged, if their mean is ``gradient``.

        None where the script has changed it otherwise than by a factor, or has not cleared it.
        """
        found = self._found.pop(name, None)
        if found is None:
            return
        whole, total = row_sketch(gradient), sum(found.values())
        if not isinstance(total, Tensor) or total.shape != whole.shape or not bool(total.any()):
            return
        # The factor that fits best, such as that of a mean or of clipping.
        factor = (whole * total).sum() / total.square().sum()
        if bool((whole - factor * total).norm() > SAME * whole.norm()):
            return
        # So scaled, their mean over the ranks is the gradient.
        for rank in range(self._ranks):
            yield found[rank] * factor * self._ranks if rank in found else whole.new_zeros(whole.shape)
