"""Read a map-style dataset: a batch sampler deals indices, and torch's loader fetches what they stand for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import torch
from torch.utils.data import DataLoader, Sampler

from lockstep.data.batch_sharding import ShardPlan
from lockstep.data.dealing import ALWAYS, Dealing, at_first_item
from lockstep.data.drawn import Drawing, DrawnOrder
from lockstep.data.order import GlobalOrder
from lockstep.data.position import nothing
from lockstep.data.readers import GlobalBatches, ReadRound, ReadStart, measured, seed_workers
from lockstep.data.rng import States
from lockstep.data.worker_states import FromWorker, SeededIndex, TellingCollate, WorkerStates
from lockstep.errors import UsageError


class ShardedBatches(Sampler[object]):
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
        self.begin = ReadStart(order.seed, 0, nothing(1))
        self.announced: deque[ReadRound] = deque()
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

    def __iter__(self) -> Iterator[object]:
        # Not a generator itself: what holds now holds for this iteration, whenever its first batch is asked for.
        if self.is_empty:
            return iter(())
        self.announced = deque()
        begin, plan = self.begin, self.plan
        if begin.drawing is None:
            # A state of torchdata counts from where this dealing began.
            [samples] = begin.behind.samples if begin.inner is None else begin.behind.base
            return at_first_item(partial(self._seeded, begin, self._dealing(begin, plan, samples, None)))
        order = DrawnOrder(self.order.sampler, self.order.opaque, begin.drawing)
        [samples] = begin.behind.samples
        self.latest = DrawnBatches(partial(self._drawn, self._dealing(begin, plan, samples, order), order))
        return at_first_item(self.latest.iterator)

    def _dealing(self, begin: ReadStart, plan: ShardPlan, samples: int, order: DrawnOrder | None) -> Dealing:
        mark, marked = partial(self._for_worker, begin), 0
        if self.workers:
            # Later ones go to workers as they are, where nothing is to be seeded.
            marked = self.workers if begin.drawing is not None and self.torch_seeds else ALWAYS
        return Dealing(
            plan, self.ranks, order, self.order.opaque, self.announced, mark, marked, samples, begin.left_out
        )

    def _seeded(self, begin: ReadStart, dealing: Dealing) -> Iterator[object]:
        order = replace(self.order, seed=begin.seed)
        first, later = order.batches(begin.epoch, dealing.samples, dealing.plan.beginning)
        return dealing.batches(later, first)

    def _drawn(self, dealing: Dealing, order: DrawnOrder) -> Iterator[object]:
        restored = self.restored
        kept = restored.turn if restored else 0
        first, again, later = order.behind(dealing.samples, dealing.plan.beginning, kept)
        batches = dealing.batches(later, first)
        if restored is None:
            return batches
        # So that each worker gets the batches that it would have had.
        indices = chain((batch[0] if self.order.opaque else batch for batch in again), batches)
        return chain(self._with_states(indices, len(again), restored), indices)

    def _with_states(self, indices: Iterator[object], turn: int, restored: WorkerStates) -> Iterator[object]:
        """The first of ``indices``; those behind ``turn`` bring the workers' generators to where they stood."""
        yield from islice(indices, turn)
        # torch hands batches to the workers in turn, so each gets one of these.
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

    def _for_worker(self, begin: ReadStart, index: object, place: int, number: int) -> object:
        """``index``, or what arrives in a worker as such, of the batch that begins at ``place`` in the order."""
        # The first batches of an iteration go to the workers one by one.
        epoch = begin.epoch if number <= self.workers and self.announces_epoch else None
        if begin.drawing is None or not self.torch_seeds:
            return SeededIndex(index, (begin.seed, begin.epoch, place), epoch)
        return index if epoch is None else SeededIndex(index, None, epoch)

    def __len__(self) -> int:
        batches = len(self.order)
        return sum(self.plan.length(batches, rank, sample_count(self.order.sampler)) for rank in self.ranks)


def sample_count(batch_sampler: object) -> int | None:
    """Number of indices a batch sampler draws in an epoch, where it can be known."""
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

    def read(self, begin: ReadStart) -> GlobalBatches:
        seed_workers(self.inner, begin, self.own)
        self.batches.begin = begin
        loaded = 0
        if begin.inner is not None:
            # The order is dealt from the base, and torchdata leaves out what came after that.
            self.inner.load_state_dict(begin.inner)  # type: ignore[attr-defined]
            [loaded] = begin.behind.rounds
        source = iter(self.inner) if begin.drawing is None else self._begun(begin, begin.drawing)
        return self._with_rounds(source, self.batches.announced, loaded)

    def _with_rounds(
        self, source: Iterator[object], announced: deque[ReadRound], loaded: int
    ) -> GlobalBatches:
        width = len(self.batches.ranks)
        if self.tells:
            source = self._received(source)
        rounds: Iterator[Sequence[object]] = (
            zip(source, strict=False) if width == 1 else iter(lambda: list(islice(source, width)), [])
        )
        is_exact = self.has_position and not self.batches.order.opaque
        if is_exact and not loaded and not self.keeps_inner_state:
            # Pairs, made without a call of Python code: a batch first, with which its round is announced.
            return zip(rounds, iter(announced.popleft, None), strict=False)
        return self._with_more(rounds, announced, loaded, is_exact)

    def _with_more(
        self, rounds: Iterator[Sequence[object]], announced: deque[ReadRound], loaded: int, is_exact: bool
    ) -> GlobalBatches:
        """The rounds with what their batches and torchdata's loader say; ``loaded`` ones are behind."""
        alone = self.batches.plan.world_size == 1
        for parts in rounds:
            # They were announced when torchdata left them out, just now.
            for _ in range(loaded):
                announced.popleft()
            loaded = 0
            this = announced.popleft()
            if not is_exact:
                this = this._replace(counts=measured(parts[0]) if alone else None)
            if self.keeps_inner_state:
                this = this._replace(inner=self.inner.state_dict())  # type: ignore[attr-defined]
            yield parts, this

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

    def _begun(self, begin: ReadStart, drawing: Drawing) -> Iterator[object]:
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
                self.batches.latest.iterator()
                # The saved run had these batches already: they only bring the workers to their turn.
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
                batch, worker, states = message
                self._workers.turn = (worker + 1) % len(self._workers.states)
                if states is not None:
                    self._workers.states[worker] = states.states()
                yield batch
            else:
                yield message
