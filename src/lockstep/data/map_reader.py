"""Read a map-style dataset: a batch sampler deals indices, and torch's loader fetches what they stand for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from torch.utils.data import DataLoader, Sampler

from lockstep.data.batch_sharding import ShardPlan
from lockstep.data.dealing import Dealing, at_first_item
from lockstep.data.drawn import DrawnOrder
from lockstep.data.order import GlobalOrder
from lockstep.data.position import nothing
from lockstep.data.readers import (
    GlobalBatches,
    PersistentWorkers,
    ReadRound,
    ReadStart,
    measured,
    seed_workers,
)
from lockstep.data.worker_seeds import SeededIndex
from lockstep.errors import UsageError


class ShardedBatches(Sampler[object]):
    """A batch sampler that yields the batches of ``ranks``, in turn, out of the global order.

    ``begin`` and ``plan`` hold for the iterations that start after they are set; ``announced`` are the rounds of the
    latest one whose indices were dealt, and ``latest`` is its order if the samplers draw that. With ``workers`` the
    batches are for so many worker processes, and seed the generators there. Without a ``begin`` there are none.
    """

    def __init__(self, order: GlobalOrder, plan: ShardPlan, ranks: Sequence[int], workers: int) -> None:
        self.order = order
        self.plan = plan
        self.ranks = tuple(ranks)
        self.workers = workers
        self.begin: ReadStart | None = ReadStart(order.seed, 0, nothing(1))
        self.announced: deque[ReadRound] = deque()
        self.latest: DrawnBatches | None = None

    @property
    def batch_sampler(self) -> object:
        """The user's sampler."""
        return self.order.sampler

    @property
    def sampler(self) -> object:
        return getattr(self.order.sampler, "sampler", self.order.sampler)

    @property
    def batch_size(self) -> int | None:
        return self.plan.rank_batch_size

    @property
    def drop_last(self) -> bool:
        return self.plan.drop_last

    def __iter__(self) -> Iterator[object]:
        # Not a generator itself: what holds now holds for this iteration, whenever its first batch is asked for.
        self.announced = deque()
        begin, plan = self.begin, self.plan
        if begin is None:
            return iter(())
        [samples] = begin.behind.samples
        if begin.drawing is None:
            return at_first_item(partial(self._seeded, begin, self._dealing(begin, plan, samples, None)))
        order = DrawnOrder(self.order.sampler, self.order.opaque, begin.drawing)
        self.latest = DrawnBatches(partial(self._drawn, self._dealing(begin, plan, samples, order), order))
        return at_first_item(self.latest.iterator)

    def _dealing(self, begin: ReadStart, plan: ShardPlan, samples: int, order: DrawnOrder | None) -> Dealing:
        mark = partial(self._for_worker, begin) if self.workers else None
        return Dealing(
            plan, self.ranks, order, self.order.opaque, self.announced, mark, samples, begin.left_out
        )

    def _seeded(self, begin: ReadStart, dealing: Dealing) -> Iterator[object]:
        order = replace(self.order, seed=begin.seed)
        first, later = order.batches(begin.epoch, dealing.samples, dealing.plan.beginning)
        return dealing.batches(later, first)

    def _drawn(self, dealing: Dealing, order: DrawnOrder) -> Iterator[object]:
        first, later = order.behind(dealing.samples, dealing.plan.beginning)
        return dealing.batches(later, first)

    def _for_worker(self, begin: ReadStart, index: object, place: int, number: int) -> object:
        """Return what arrives in a worker as ``index``, of the batch that begins at ``place`` in the order."""
        # The first batches of an iteration go to the workers one by one.
        epoch = begin.epoch if number <= self.workers else None
        return SeededIndex(index, (begin.seed, begin.epoch, place), epoch)

    def __len__(self) -> int:
        batches = len(self.order)
        return sum(self.plan.length(batches, rank, sample_count(self.order.sampler)) for rank in self.ranks)


def sample_count(batch_sampler: object) -> int | None:
    """Return the number of indices a batch sampler draws in an epoch, where it can be known."""
    sampler = getattr(batch_sampler, "sampler", None)
    return len(sampler) if isinstance(sampler, Sized) else None


class DrawnBatches:
    """The batches that ``make`` gives, which goes through what is behind them first: now, or with the first batch."""

    def __init__(self, make: Callable[[], Iterator[object]]) -> None:
        self._make = make
        self._batches: Iterator[object] | None = None

    def iterator(self) -> Iterator[object]:
        if self._batches is None:
            self._batches = self._make()
        return self._batches


class MapReader:
    """Reads a map-style dataset. What is known of a round stays in this process: batches arrive in order.

    ``own`` is the generator of the user's loader.
    """

    def __init__(
        self, inner: DataLoader[object], batches: ShardedBatches, own: torch.Generator | None = None
    ) -> None:
        self.inner = inner
        self.batches = batches
        # Batches that workers hand over out of order cannot be matched with what was announced of them.
        self.has_position = inner.num_workers == 0 or getattr(inner, "in_order", True)
        self.own = own
        self.workers = PersistentWorkers(inner)

    def read(self, begin: ReadStart) -> GlobalBatches:
        seed_workers(self.inner, begin, self.own)
        if begin.drawing is not None:
            self.batches.begin = None
            self.workers.begin(begin.drawing)
        self.batches.begin = begin
        with nullcontext() if begin.drawing is None else begin.drawing.beginning():
            source = iter(self.inner)
            if begin.drawing is not None and begin.drawing.is_replay:
                assert self.batches.latest is not None
                self.batches.latest.iterator()
        announced, width = self.batches.announced, len(self.batches.ranks)
        rounds: Iterator[Sequence[object]] = (
            zip(source, strict=False) if width == 1 else iter(lambda: list(islice(source, width)), [])
        )
        if self.has_position and not self.batches.order.opaque:
            # Pairs, made without a call of Python code: a batch first, with which its round is announced.
            return zip(rounds, iter(announced.popleft, None), strict=False)
        return self._measured(rounds, announced)

    def _measured(self, rounds: Iterator[Sequence[object]], announced: deque[ReadRound]) -> GlobalBatches:
        """Yield the rounds with the counts that their batches show."""
        alone = self.batches.plan.world_size == 1
        for parts in rounds:
            yield parts, announced.popleft()._replace(counts=measured(parts[0]) if alone else None)

    def exhaust(self) -> None:
        """Let samplers draw what they draw behind their last sample: ``RandomSampler`` draws one more permutation.

        Raises:
            UsageError: it was not the last one.
        """
        order = self.batches.latest
        if order is not None and next(order.iterator(), None) is not None:
            sampler = type(self.batches.batch_sampler).__name__
            raise UsageError(
                f"The loop has the last batch by len() of its {sampler}, but the sampler gives more. Give it an exact "
                "__len__, or none."
            )
