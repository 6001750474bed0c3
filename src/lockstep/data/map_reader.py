"""Read a map-style dataset: a batch sampler deals indices, and torch's loader fetches what they stand for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Sampler

from lockstep.data.batch_sharding import GlobalBatch, ShardPlan, rounds
from lockstep.data.drawn import Drawing, DrawnOrder
from lockstep.data.order import GlobalOrder
from lockstep.data.position import Progress, nothing
from lockstep.data.readers import Begin, GlobalBatches, ReadBatch, measured, seed_workers
from lockstep.data.rng import States
from lockstep.data.worker_states import FromWorker, SeededIndex, TellingCollate, WorkerStates
from lockstep.runtime.step import BatchCounts


class PendingBatch(NamedTuple):
    """What is known of a round when its indices are dealt; see ``ReadBatch``."""

    counts: BatchCounts
    last: bool
    behind: Progress | None
    digest: int | None


class ShardedBatches(Sampler[Any]):
    """A batch sampler that yields the batches of ``ranks``, in turn, out of the global order.

    ``begin`` and ``plan`` hold for the iterations that start after they are set; ``announced`` are the rounds of the
    latest one whose indices were dealt, and ``latest`` is its order if the samplers draw that. With ``workers`` the
    batches are for so many worker processes. They seed the generators there, unless torch has (``torch_seeds``); then
    ``restored`` says where these generators stand when the iteration begins. A sampler that is ``empty`` gives nothing.
    """

    def __init__(self, order: GlobalOrder, plan: ShardPlan, ranks: Sequence[int], workers: int) -> None:
        self.order = order
        self.plan = plan
        self.ranks = tuple(ranks)
        self.workers = workers
        self.begin = Begin(order.seed, 0, nothing(1))
        self.announced: deque[PendingBatch] = deque()
        self.latest: DrawnBatches | None = None
        self.torch_seeds = False
        self.announces_epoch = True
        self.restored: WorkerStates | None = None
        self.is_empty = False

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

    def __iter__(self) -> Iterator[Any]:
        # Not a generator itself: what holds now holds for this iteration, whenever its first batch is asked for.
        if self.is_empty:
            return iter(())
        self.announced = deque()
        begin, plan = self.begin, self.plan
        if begin.drawing is None:
            return self._seeded(begin, plan, self.announced)
        order = DrawnOrder(self.order.sampler, self.order.opaque, begin.drawing)
        self.latest = DrawnBatches(partial(self._drawn, order, begin, plan, self.announced))
        return self.latest

    def _seeded(self, begin: Begin, plan: ShardPlan, announced: deque[PendingBatch]) -> Iterator[object]:
        order = replace(self.order, seed=begin.seed)
        # A state of torchdata counts from where this dealing began.
        [samples] = begin.behind.samples if begin.inner is None else begin.behind.base
        first, later = order.batches(begin.epoch, samples, plan.beginning)
        yield from self._indices_of(rounds(later, plan, first), samples, begin, announced, None)

    def _drawn(
        self, order: DrawnOrder, begin: Begin, plan: ShardPlan, announced: deque[PendingBatch]
    ) -> Iterator[object]:
        [samples] = begin.behind.samples
        restored = self.restored
        first, again, later = order.behind(samples, plan.beginning, restored.turn if restored else 0)
        batches = self._indices_of(rounds(later, plan, first), samples, begin, announced, order)
        if restored is None:
            return batches
        # So that each worker gets the batches that it would have had.
        indices = chain((batch[0] if self.order.opaque else batch for batch in again), batches)
        return self._with_states(indices, len(again), restored)

    def _with_states(self, indices: Iterator[object], turn: int, restored: WorkerStates) -> Iterator[object]:
        """``indices`` of which the first ones behind ``turn`` bring the workers' generators to where they stood."""
        yield from islice(indices, turn)
        for i in range(turn, turn + self.workers):
            index = next(indices, self)
            if index is self:
                return
            states, restored.states[i % self.workers] = restored.states[i % self.workers], None
            if isinstance(index, SeededIndex):
                index.states = states
            elif states is not None:
                index = SeededIndex(index, None, None, states)
            yield index
        yield from indices

    def _indices_of(
        self,
        batches: Iterator[GlobalBatch[object]],
        samples: int,
        begin: Begin,
        announced: deque[PendingBatch],
        order: DrawnOrder | None,
    ) -> Iterator[object]:
        for left_out in islice(batches, begin.left_out):
            samples += left_out.counts.total
        base, done = (samples,), 0
        for this, is_over, coming, digest in self._with_ends(batches, samples, order):
            start = samples
            samples += this.counts.total
            done += 1
            parts = self._own_parts(this)
            if not parts:
                continue
            behind = None if is_over else Progress((samples,), base, (done,))
            announced.append(PendingBatch(this.counts, not coming, behind, digest))
            for rank, part in parts:
                index = part[0] if self.order.opaque else part
                yield self._for_worker(index, begin, start + sum(this.counts.rows[:rank]), done)

    def _with_ends(
        self, batches: Iterator[GlobalBatch[object]], samples: int, order: DrawnOrder | None
    ) -> Iterator[tuple[GlobalBatch[object], bool, bool, int | None]]:
        """Each round, whether the epoch is over with it, whether these ranks have a batch in the next one, a digest."""
        if order is not None and self.plan.world_size == 1 and order.is_over(samples) is not None:
            # To look ahead would draw what the next batch needs before this one is trained on.
            for this in batches:
                samples += this.counts.total
                is_over = bool(order.is_over(samples))
                yield this, is_over, not is_over, order.digest
            return
        following = next(batches, None)
        while following is not None:
            digest = None if order is None else order.digest
            this, following = following, next(batches, None)
            yield this, following is None, bool(self._own_parts(following)), digest

    def _for_worker(self, index: object, begin: Begin, place: int, number: int) -> object:
        """``index``, or what arrives in a worker as such, of the batch that begins at ``place`` in the order."""
        if not self.workers:
            return index
        # The first batches of an iteration go to the workers one by one.
        epoch = begin.epoch if number <= self.workers and self.announces_epoch else None
        if begin.drawing is None or not self.torch_seeds:
            return SeededIndex(index, (begin.seed, begin.epoch, place), epoch)
        return index if epoch is None else SeededIndex(index, None, epoch)

    def _own_parts(self, batch: GlobalBatch[object] | None) -> list[tuple[int, list[object]]]:
        """Rank and rows, for those of ``ranks`` that have a batch in this round."""
        return (
            [] if batch is None else [(rank, batch.parts[rank]) for rank in self.ranks if batch.parts[rank]]
        )

    def __len__(self) -> int:
        batches = len(self.order)
        return sum(self.plan.length(batches, rank, sample_count(self.order.sampler)) for rank in self.ranks)


def sample_count(batch_sampler: object) -> int | None:
    """Number of indices a batch sampler draws in an epoch, where it can be known."""
    sampler = getattr(batch_sampler, "sampler", None)
    return len(sampler) if isinstance(sampler, Sized) else None


class DrawnBatches(Iterator[Any]):
    """The batches that ``make`` gives, which goes through what is behind them first: now, or with the first batch."""

    def __init__(self, make: Callable[[], Iterator[object]]) -> None:
        self._make = make
        self._batches: Iterator[object] | None = None

    def come(self) -> Iterator[object]:
        if self._batches is None:
            self._batches = self._make()
        return self._batches

    def __next__(self) -> object:
        return next(self.come())


class MapReader:
    """Reads a map-style dataset. What is known of a round stays in this process: batches arrive in order.

    ``own`` is the generator of the user's loader. With ``torch_seeds`` torch seeds the workers, which say where their
    generators stand.
    """

    def __init__(
        self,
        inner: DataLoader[object],
        batches: ShardedBatches,
        keeps_inner_state: bool,
        own: torch.Generator | None = None,
        torch_seeds: bool = False,
    ) -> None:
        self.inner = inner
        self.batches = batches
        self.keeps_inner_state = keeps_inner_state
        # Batches that workers hand over out of order cannot be matched with what was announced of them.
        self.has_position = inner.num_workers == 0 or getattr(inner, "in_order", True)
        self.own = own
        self.tells = torch_seeds and isinstance(inner.collate_fn, TellingCollate)
        batches.torch_seeds = torch_seeds
        # Others are made anew in each epoch, and get a dataset that knows it.
        batches.announces_epoch = inner.persistent_workers or not torch_seeds
        self._workers = WorkerStates.of(inner.num_workers)
        self._loaded: WorkerStates | None = None
        self._are_made = False
        self._made_at: States | None = None

    def read(self, begin: Begin) -> GlobalBatches:
        seed_workers(self.inner, begin, self.own)
        self.batches.begin = begin
        loaded = 0
        if begin.inner is not None:
            # The order is dealt from the base, and torchdata leaves out what came after that.
            self.inner.load_state_dict(begin.inner)  # type: ignore[attr-defined]
            [loaded] = begin.behind.rounds
        source = iter(self.inner) if begin.drawing is None else self._begun(begin, begin.drawing)
        return self._with_counts(source, self.batches.announced, loaded)

    def _with_counts(
        self, source: Iterator[object], announced: deque[PendingBatch], loaded: int
    ) -> GlobalBatches:
        width = len(self.batches.ranks)
        exact = self.has_position and not self.batches.order.opaque
        alone = self.batches.plan.world_size == 1
        if self.tells:
            source = self._received(source)
        rows_of_ranks = (
            ([batch] for batch in source) if width == 1 else iter(lambda: list(islice(source, width)), [])
        )
        for parts in rows_of_ranks:
            # They were announced when torchdata left them out, just now.
            for _ in range(loaded):
                announced.popleft()
            loaded = 0
            counts: BatchCounts | None
            counts, last, behind, digest = announced.popleft()
            if not exact:
                counts = measured(parts[0]) if alone else None
            inner = self.inner.state_dict() if self.keeps_inner_state else None  # type: ignore[attr-defined]
            yield ReadBatch(parts, counts, last, behind, inner, digest)

    # -- workers whose generators torch has seeded ---------------------------------------------------

    def worker_states(self, is_midway: bool) -> WorkerStates | None:
        """What the next iteration must know of the workers; None: nothing."""
        if self._loaded is not None:
            return self._loaded
        if not self.tells or not (is_midway or (self.inner.persistent_workers and self._are_made)):
            return None
        return self._workers if is_midway else replace(self._workers, turn=0, born=self._made_at)

    def load_worker_states(self, states: WorkerStates | None) -> None:
        fits = states is not None and self.tells and len(states.states) == self.inner.num_workers
        self._loaded = states if fits else None

    def _begun(self, begin: Begin, drawing: Drawing) -> Iterator[object]:
        persist = self.inner.persistent_workers
        loaded, self._loaded = self._loaded, None
        if not (drawing.is_replay or persist):
            loaded = None
        if persist and not self._are_made and loaded is not None and loaded.born is not None:
            self._make_workers(loaded.born)
        # Workers that persist keep their generators from epoch to epoch; new ones begin where torch seeds them.
        is_new = not (persist and self._are_made)
        if loaded is not None:
            self._workers = replace(loaded, born=loaded.born if persist else None)
        elif is_new:
            self._workers = WorkerStates.of(self.inner.num_workers)
        else:
            self._workers = replace(self._workers, turn=0, born=self._made_at)
        if is_new:
            self._are_made, self._made_at = True, drawing.start
        left = self.batches.restored
        if loaded is not None:
            self.batches.restored = replace(loaded, states=list(loaded.states))
        elif persist and left is not None and any(left.states):
            # The epoch that was continued had no batch for some of the workers.
            self.batches.restored = replace(left, turn=0)
        else:
            self.batches.restored = None
        with drawing.beginning():
            source = iter(self.inner)
            if drawing.is_replay:
                assert self.batches.latest is not None
                self.batches.latest.come()
                for _ in range(0 if loaded is None else loaded.turn):
                    next(source)
        return source

    def _make_workers(self, born: States) -> None:
        """Workers that persist, made in an epoch without samples, as the saved run made them."""
        assert self.batches.begin.drawing is not None
        self.batches.is_empty = True
        with self.batches.begin.drawing.generators.at(born):
            iter(self.inner)
        self.batches.is_empty = False
        self._are_made, self._made_at = True, born

    def _received(self, source: Iterator[object]) -> Iterator[object]:
        for message in source:
            if isinstance(message, FromWorker):
                self._workers.received(message)
                yield message.batch
            else:
                yield message
