"""Read an iterable dataset: the process, or each of its workers, deals the stream and keeps its ranks' part."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info, graph_settings

from lockstep.comm.tree import StateDict
from lockstep.data.batch_sharding import GlobalBatch, ShardPlan, grouped, later, rounds
from lockstep.data.order import announce_epoch_to
from lockstep.data.position import Progress
from lockstep.data.readers import row_count
from lockstep.data.rng import (
    States,
    generator_states,
    mixed_seed,
    seed_generators,
    set_generator_states,
)
from lockstep.data.worker_states import SentStates, WorkerStates, read_generators, write_generators
from lockstep.runtime.step import BatchCounts

MOST_AHEAD = 4
"""Batches of which a worker remembers where its generators stood. Two are read ahead of what torch's loader reads."""

# What a stream yields: number of the worker, samples in the round, batches of its ranks (None: one has none), counts.
# A round of no samples only passes the turn to the next worker, and may say where the generators of this one stand.
WorkerMessage = tuple[int, int, "list[object] | SentStates | None", "BatchCounts | None"]


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
        # Seeds are unsigned, and the shared tensor is int64.
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


class ShardedStream(IterableDataset[object]):
    """An iterable dataset that yields ``WorkerMessage``: the batches of ``ranks``, collated, one round at a time.

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
        collate_fn: Callable[[object], object],
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

    def __iter__(self) -> Iterator[WorkerMessage]:
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
        begun = SentStates(read_generators(self._dataset)) if tells else None
        return self._messages(number, behind, self._samples(), begun)

    def _go_back(self, number: int) -> None:
        """To where this worker would stand under torch's loader, which reads less ahead of an epoch that is left."""
        asked = self._stream_start.asked_before(number)
        states = next((states for count, states in self._made if count == asked), None)
        if states is not None:
            write_generators(self._dataset, states)
        self._made.clear()

    def _restore(self, number: int) -> None:
        restored, self._restored = self._restored, None
        if restored is not None:
            states = restored.states[number]
            if states is not None:
                write_generators(self._dataset, states)

    def _messages(
        self, number: int, behind: Progress, samples: Iterator[object], begun: SentStates | None
    ) -> Iterator[WorkerMessage]:
        if begun is not None:
            yield number, 0, begun, None
        # torch's loader begins with worker 0, so workers before the one whose turn it is pass it on.
        if number < behind.turn:
            yield number, 0, None, None
        for i, this in enumerate(self._rounds(behind.base[number], samples)):
            parts = [this.parts[rank] for rank in self._ranks]
            batches, counts = self._collated(parts, this)
            if begun is not None:
                self._made.append((i + 1, read_generators(self._dataset)))
            # Made although it was handed out before: it may draw random numbers.
            if i >= behind.rounds[number]:
                yield number, this.counts.total, batches, counts
        if begun is not None:
            yield number, 0, SentStates(read_generators(self._dataset)), None

    def _rounds(self, behind: int, samples: Iterator[object]) -> Iterator[GlobalBatch[object]]:
        size = self._sample_batch_size or 1
        first, rest = later(samples, behind, self._plan.beginning * size)
        beginning = list(grouped(first, size, drop_last=False))
        return rounds(grouped(rest, size, self._drop_last), self._plan, beginning)

    def _samples(self) -> Iterator[object]:
        return iter(self._dataset)

    def _collated(
        self, parts: Sequence[Sequence[object]], this: GlobalBatch[object]
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
        self._loaded: StateDict | None = None

    def __iter__(self) -> Iterator[WorkerMessage]:
        self._source, self._ended = None, False
        return super().__iter__()

    def state_dict(self) -> StateDict:
        if self._loaded is not None:
            # No sample was read since.
            return self._loaded
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
