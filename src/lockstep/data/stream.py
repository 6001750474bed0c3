"""Read an iterable dataset: the process, or each of its workers, deals the stream and keeps its ranks' part."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info, graph_settings

from lockstep.data.batch_sharding import GlobalBatch, ShardPlan, grouped, later, rounds
from lockstep.data.drawn import Drawing
from lockstep.data.order import announce_epoch_to
from lockstep.data.position import Progress, nothing
from lockstep.data.readers import Begin, GlobalBatches, ReadBatch, row_count, seed_workers
from lockstep.data.rng import (
    Generators,
    PrivateDraws,
    States,
    draw_privately,
    generator_states,
    mixed_seed,
    seed_generators,
    set_generator_states,
)
from lockstep.data.worker_states import Told, WorkerStates
from lockstep.runtime.step import BatchCounts

MOST_AHEAD = 4
"""Batches of which a worker remembers where its generators stood. Two are read ahead of what torch's loader reads."""

# What a stream yields: number of the worker, samples in the round, batches of its ranks (None: one has none), counts.
# A round of no samples only passes the turn to the next worker, and may say where the generators of this one stand.
Message = tuple[int, int, "list[Any] | Told | None", "BatchCounts | None"]


class StreamStart:
    """Where the workers' streams begin, in memory that they share: workers that persist get no new dataset.

    The seed is that of the order, or where torch seeds (``drawn``) that of data pipes.
    """

    def __init__(self, workers: int) -> None:
        streams = max(1, workers)
        self.streams = streams
        self.numbers = torch.zeros(4 + 3 * streams, dtype=torch.int64)
        if workers:
            self.numbers.share_memory_()

    def give(
        self, seed: int, epoch: int, behind: Progress, drawn: bool, before: Sequence[int] | None = None
    ) -> None:
        """``before``: how many batches of the epoch before torch's loader would have asked each worker for."""
        signed = (seed + 2**63) % 2**64 - 2**63
        asked = [-1] * self.streams if before is None else before
        numbers = [signed, epoch, int(drawn), behind.turn, *behind.base, *behind.rounds, *asked]
        self.numbers.copy_(torch.tensor(numbers))

    def take(self) -> tuple[int, int, bool, Progress]:
        seed, epoch, drawn, turn, *counts = self.numbers.tolist()
        base, done = counts[: self.streams], counts[self.streams : 2 * self.streams]
        return seed, epoch, bool(drawn), Progress(tuple(base), tuple(base), tuple(done), turn)

    def asked_before(self, worker: int) -> int:
        return int(self.numbers[4 + 2 * self.streams + worker])


class ShardedStream(IterableDataset[Any]):
    """An iterable dataset that yields ``Message``: the batches of ``ranks``, collated, one round at a time.

    Every process (and every worker process in it) iterates the whole user dataset and keeps its part.
    Attributes are read and written through to the user's dataset, because functions given as
    ``worker_init_fn`` set them on ``get_worker_info().dataset``.
    """

    _own: tuple[str, ...] = (
        "_dataset",
        "_plan",
        "_ranks",
        "_sample_batch_size",
        "_drop_last",
        "_collate_fn",
        "_stream_start",
        "_tells",
        "_restored",
        "_made",
    )

    def __init__(
        self,
        dataset: Iterable[object],
        plan: ShardPlan,
        ranks: Sequence[int],
        sample_batch_size: int | None,
        drop_last: bool,
        collate_fn: Callable[[object], Any],
        workers: int,
    ) -> None:
        self._dataset = dataset
        self._plan = plan
        self._ranks = tuple(ranks)
        self._sample_batch_size = sample_batch_size
        self._drop_last = drop_last
        self._collate_fn = collate_fn
        self._stream_start = StreamStart(workers)
        # Whether workers say where their generators stand, and where they stand when they are made.
        self._tells = False
        self._restored: WorkerStates | None = None
        # The last batches that a worker has made: how many there were, and where its generators stood then.
        self._made: deque[tuple[int, States]] = deque(maxlen=MOST_AHEAD)

    def __getattr__(self, name: str) -> Any:
        # A state of the dataset alone would lack the first round that completes the last one.
        if name in (*self._own, "state_dict", "load_state_dict") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._dataset, name, value)

    def __iter__(self) -> Iterator[Message]:
        # Not a generator itself: where streams begin now holds for this iteration.
        worker = get_worker_info()
        seed, epoch, drawn, behind = self._stream_start.take()
        number = 0 if worker is None else worker.id
        if worker is not None:
            if not drawn:
                seed_generators(mixed_seed(seed, epoch, number))
            self._go_back(number)
            self._restore(number)
            announce_epoch_to(self._dataset, seed, epoch, not drawn)
        if isinstance(self._dataset, IterDataPipe):
            # What torch's loader does for one that it holds itself.
            generator = torch.Generator().manual_seed(seed if drawn else mixed_seed(seed, epoch))
            graph_settings.apply_random_seed(self._dataset, generator)
            if worker is not None:
                graph_settings.apply_sharding(self._dataset, worker.num_workers, worker.id)
        tells = self._tells and drawn and worker is not None
        begun = Told(Generators().read()) if tells else None
        return self._messages(number, behind, self._samples(), begun)

    def _go_back(self, number: int) -> None:
        """To where this worker would stand under torch's loader, which reads less ahead of an epoch that is left."""
        asked = self._stream_start.asked_before(number)
        states = next((states for count, states in self._made if count == asked), None)
        if states is not None:
            Generators().write(states)
        self._made.clear()

    def _restore(self, number: int) -> None:
        restored, self._restored = self._restored, None
        if restored is not None:
            states = restored.states[number]
            if states is not None:
                Generators().write(states)

    def _messages(
        self, number: int, behind: Progress, samples: Iterator[object], begun: Told | None
    ) -> Iterator[Message]:
        if begun is not None:
            yield number, 0, begun, None
        if number < behind.turn:
            yield number, 0, None, None
        for i, this in enumerate(self._rounds(behind.base[number], samples)):
            parts = [this.parts[rank] for rank in self._ranks]
            batches, counts = self._collated(parts, this)
            if begun is not None:
                self._made.append((i + 1, Generators().read()))
            # Made although it was handed out before: it may draw random numbers.
            if i >= behind.rounds[number]:
                yield number, this.counts.total, batches, counts
        if begun is not None:
            yield number, 0, Told(Generators().read()), None

    def _rounds(self, behind: int, samples: Iterator[object]) -> Iterator[GlobalBatch[object]]:
        size = self._sample_batch_size or 1
        first, rest = later(samples, behind, self._plan.beginning * size)
        beginning = list(grouped(first, size, drop_last=False))
        return rounds(grouped(rest, size, self._drop_last), self._plan, beginning)

    def _samples(self) -> Iterator[object]:
        return iter(self._dataset)

    def _collated(
        self, parts: list[Any], this: GlobalBatch[object]
    ) -> tuple[list[object] | None, BatchCounts | None]:
        if not all(parts):
            return None, None
        if self._sample_batch_size is not None:
            return [self._collate_fn(part) for part in parts], this.counts
        return [self._collate_fn(part[0]) for part in parts], _opaque_counts(this)


class ResumableStream(ShardedStream):
    """The stream of a dataset that saves its own position, in a world of one: torchdata keeps its state.

    The state has that of the dataset, of its iterator where it has one, and of the random number generators. That
    the stream has ended is part of it, because a dataset at its end may be one at its beginning.
    """

    _own = (*ShardedStream._own, "_source", "_ended", "_loaded")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._source: object = None
        self._ended = False
        self._loaded: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Message]:
        self._source, self._ended = None, False
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded  # no sample was read since
        dataset, source = self._dataset, self._source
        return {
            # Copies, because what is read ahead must not change them.
            "dataset": deepcopy(dataset.state_dict()) if source is not dataset else None,  # type: ignore[attr-defined]
            "iterator": deepcopy(source.state_dict()) if hasattr(source, "state_dict") else None,
            "ended": self._ended,
            "generators": generator_states(),
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        self._loaded = state

    def _samples(self) -> Iterator[object]:
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded["dataset"] is not None:
            self._dataset.load_state_dict(loaded["dataset"])  # type: ignore[attr-defined]
        source: Any = iter(self._dataset)
        self._source = source
        if loaded is not None:
            if loaded["iterator"] is not None:
                source.load_state_dict(loaded["iterator"])
            set_generator_states(loaded["generators"])
            self._ended = loaded["ended"]
        # Not a for loop, whose iter() would begin anew a dataset that is its own iterator.
        while not self._ended:
            try:
                sample = next(source)
            except StopIteration:
                self._ended = True
            else:
                yield sample


def _opaque_counts(this: GlobalBatch[object]) -> BatchCounts | None:
    """Counts of a round whose parts hold one ready-made batch each."""
    sizes = [row_count(part[0]) if part else 0 for part in this.parts]
    rows = tuple(size for size in sizes if size is not None)
    if len(rows) < len(sizes):
        return None
    real = tuple(size if whole else 0 for size, whole in zip(rows, this.counts.real, strict=True))
    return BatchCounts(rows=rows, real=real)


def as_it_is(message: object) -> object:
    """The ``collate_fn`` of a loader whose dataset collates."""
    return message


class StreamReader:
    """Reads a ``ShardedStream``; the counts travel with the batches, also out of worker processes.

    ``own`` is the generator of the user's loader. With ``tells`` workers persist that torch has seeded.
    """

    def __init__(
        self,
        inner: DataLoader[object],
        stream: ShardedStream,
        keeps_inner_state: bool,
        own: torch.Generator | None = None,
        tells: bool = False,
    ) -> None:
        self.inner = inner
        self.stream = stream
        self.keeps_inner_state = keeps_inner_state
        # Batches of one worker never overtake each other, and each worker's are counted.
        self.has_position = True
        self.own = own
        self.tells = stream._tells = tells
        self._begun_at = WorkerStates.of(inner.num_workers)
        self._ended_at = WorkerStates.of(inner.num_workers)
        self._loaded: WorkerStates | None = None
        self._are_made = False
        self._made_at: States | None = None
        # Batches of this epoch that were handed over; None: all of them, or nobody knows.
        self._handed_over: int | None = None

    def read(self, begin: Begin) -> GlobalBatches:
        seed_workers(self.inner, begin, self.own)
        start = self.stream._stream_start
        if begin.inner is not None:
            # The dataset leaves out by itself what is behind, and torchdata knows whose turn it is.
            start.give(begin.seed, begin.epoch, nothing(self.inner.num_workers), False)
            self.inner.load_state_dict(begin.inner)  # type: ignore[attr-defined]
        elif begin.drawing is None:
            start.give(begin.seed, begin.epoch, begin.behind, False)
        if begin.drawing is not None:
            source, draws = self._begun(begin, begin.drawing)
            messages = self._drawn(source, begin.drawing, draws)
            return self._shown(self._dealt(messages, begin), draws)
        seeded: Iterator[tuple[Message, object]] = self._messages()
        if self.inner.num_workers == 0:
            # Reading ahead must not draw numbers that the loop draws too, nor must reading again.
            seed = mixed_seed(begin.seed, begin.epoch, 0)
            seeded = draw_privately(seeded, seed, block_size=1, device=None)
        return self._dealt(((message, inner, None) for message, inner in seeded), begin)

    def _messages(self) -> Iterator[tuple[Message, object]]:
        for message in self.inner:
            yield message, self.inner.state_dict() if self.keeps_inner_state else None  # type: ignore[attr-defined]

    # -- what torch's loader would draw --------------------------------------------------------------

    def _begun(self, begin: Begin, drawing: Drawing) -> tuple[Iterator[Message], PrivateDraws | None]:
        """The messages, and the draws that read them in this process."""
        loaded, self._loaded = self._loaded, None
        if not self._are_made:
            self.stream._restored = loaded
        is_new = not (self.inner.persistent_workers and self._are_made)
        made_at = loaded.born if loaded is not None and loaded.born is not None else None
        with drawing.generators.at(made_at) if made_at is not None and is_new else drawing.beginning():
            shared_seed = self._shared_seed()
            before = None if is_new else self._asked_before()
            self.stream._stream_start.give(shared_seed, begin.epoch, begin.behind, True, before)
            source = iter(self.inner)
            if self.inner.num_workers and is_new:
                self._shared_seed()  # torch's loader draws it for its workers once more
        if is_new and self.inner.persistent_workers:
            self._are_made = True
            self._made_at = drawing.start if made_at is None else made_at
            self._begun_at = replace(self._begun_at, born=made_at)
        else:
            self._begun_at = replace(self._begun_at, born=self._made_at)
        if self.inner.num_workers:
            return source, None
        return source, self._private(drawing)

    def _asked_before(self) -> list[int] | None:
        """How many batches torch's loader would have asked each worker for, of an epoch that was left midway.

        Of one behind another as they are taken; so many ahead from the beginning. Where a worker has come to its end
        by then, torch's loader asks the others as they happen to answer.
        """
        taken, self._handed_over = self._handed_over, None
        if taken is None or self.stream._plan.world_size > 1:
            return None
        workers = self.inner.num_workers
        asked = taken + workers * cast(int, self.inner.prefetch_factor)
        return [len(range(worker, asked, workers)) for worker in range(workers)]

    def _shared_seed(self) -> int:
        """What torch's loader draws for a data pipe."""
        if not isinstance(self.stream._dataset, IterDataPipe):
            return 0
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.inner.generator).item())

    def _private(self, drawing: Drawing) -> PrivateDraws:
        """Reading ahead must not draw what the loop draws, nor must reading again."""
        draws = PrivateDraws(drawing.generators, [])
        draws.shown = drawing.shown or []
        return draws

    def _drawn(
        self, source: Iterator[Message], drawing: Drawing, draws: PrivateDraws | None
    ) -> Iterator[tuple[Message, object, States | None]]:
        if draws is None:
            for message in source:
                yield message, None, None
            return
        if drawing.first is None:
            drawing.first = drawing.generators.read() if drawing.private is None else drawing.private.states
        draws.states = drawing.first
        draws.shown = drawing.shown or drawing.first
        while True:
            with draws.hidden():
                following = next(source, None)
            if following is None:
                return
            yield following, None, draws.states

    def _shown(self, dealt: GlobalBatches, draws: PrivateDraws | None) -> GlobalBatches:
        """``dealt``, with the generators at each of them where torch's loader would have brought them."""
        for this in dealt:
            if draws is not None and this.states is not None:
                draws.show(this.states)
            yield this
        if draws is not None:
            draws.show(draws.states)

    def worker_states(self, is_midway: bool) -> WorkerStates | None:
        if self._loaded is not None:
            return self._loaded
        if not (self.tells and self._are_made):
            return None
        return self._begun_at if is_midway else replace(self._ended_at, born=self._made_at)

    def load_worker_states(self, states: WorkerStates | None) -> None:
        fits = states is not None and self.tells and len(states.states) == self.inner.num_workers
        self._loaded = states if fits else None

    # -- rounds ---------------------------------------------------------------------------------------

    def _dealt(self, messages: Iterator[tuple[Message, Any, States | None]], begin: Begin) -> GlobalBatches:
        """One round behind ``messages``, because only the end of a stream says which one is the last."""
        behind = begin.behind
        left_out = 0
        held: ReadBatch | None = None
        others_go_on = False
        told: set[int] = set()
        knows = not any((*behind.base, *behind.rounds, behind.turn, left_out))
        self._handed_over = 0 if knows and not begin.left_out else None
        for (worker, samples, batches, counts), inner, states in messages:
            if isinstance(batches, Told):
                known = self._ended_at if worker in told else self._begun_at
                known.states[worker] = batches.states()
                told.add(worker)
                continue
            if not samples:
                continue
            behind = behind.after(worker, samples)
            if batches is None:
                others_go_on = True
                continue
            if left_out < begin.left_out:
                left_out += 1
                continue
            if held is not None:
                self._hands_over()
                yield held
            held = ReadBatch(batches, counts, last=False, behind=behind, inner=inner, states=states)
            others_go_on = False
        if held is not None:
            self._hands_over()
            yield held._replace(last=True, behind=held.behind if others_go_on else None)
        self._handed_over = None

    def _hands_over(self) -> None:
        if self._handed_over is not None:
            self._handed_over += 1
