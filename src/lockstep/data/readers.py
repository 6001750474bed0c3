"""Readers: a torch ``DataLoader`` inside that yields, round by round, the batches of chosen ranks.

Each reader has ``inner``, the loader built around the user's dataset, and ``read(epoch, start, loaded)``:
an iterator over ``(batches, counts)``, with one batch for each of the reader's ranks. The first ``start``
rounds of the epoch are left out, and after them ``loaded`` more, those that a state loaded into ``inner``
has behind it (0: no state was loaded).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import count, islice
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset, Sampler

from lockstep.comm.tree import find_batch_size
from lockstep.data.order import GlobalOrder
from lockstep.data.shard import Round, ShardPlan, grouped, rounds
from lockstep.runtime.step import BatchCounts

Rounds = Iterator[tuple[list[Any], BatchCounts | None]]


class Reader(Protocol):
    @property
    def inner(self) -> DataLoader[Any]: ...

    def read(self, epoch: int, start: int, loaded: int = 0) -> Rounds: ...


class ShardedBatches(Sampler[Any]):
    """A batch sampler that yields the batches of ``ranks``, in turn, out of the global order.

    With ``opaque`` an item of the order is not a list of rows but whatever the dataset makes a batch of.
    ``epoch`` and ``start`` (rounds to leave out) hold for the iterations that begin after they are set.
    """

    def __init__(self, order: GlobalOrder, plan: ShardPlan, ranks: Sequence[int], opaque: bool) -> None:
        self.order = order
        self.plan = plan
        self.ranks = tuple(ranks)
        self.opaque = opaque
        self.epoch = 0
        self.start = 0
        self.counts: dict[int, BatchCounts] = {}

    @property
    def batch_sampler(self) -> Any:
        """The user's sampler."""
        return self.order.sampler

    @property
    def sampler(self) -> Any:
        return getattr(self.order.sampler, "sampler", self.order.sampler)

    @property
    def batch_size(self) -> int | None:
        return self.plan.rank_batch_size

    @property
    def drop_last(self) -> bool:
        return self.plan.drop_last

    def rounds(self) -> Iterator[Round[Any]]:
        items: Iterable[Any] = self.order.items(self.epoch)
        batches = ([item] for item in items) if self.opaque else items
        return islice(rounds(batches, self.plan), self.start, None)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator itself: epoch and start are read now, not when the first batch is asked for.
        self.counts = {}
        return self._batches(self.rounds(), self.counts, self.start)

    def _batches(
        self, dealt: Iterator[Round[Any]], counts: dict[int, BatchCounts], start: int
    ) -> Iterator[Any]:
        position = start
        for this in dealt:
            parts = [this.parts[rank] for rank in self.ranks if this.parts[rank]]
            if parts:
                counts[position] = this.counts
                position += 1
            for part in parts:
                yield part[0] if self.opaque else part

    def __len__(self) -> int:
        batches = len(self.order)
        return sum(self.plan.length(batches, rank, sample_count(self.order.sampler)) for rank in self.ranks)


def sample_count(batch_sampler: Any) -> int | None:
    """Number of indices a batch sampler draws in an epoch, where it can be known."""
    sampler = getattr(batch_sampler, "sampler", None)
    return len(sampler) if isinstance(sampler, Sized) else None


class MapReader:
    """Reads a map-style dataset. The counts stay in this process: batches arrive in the sampler's order."""

    def __init__(self, inner: DataLoader[Any], batches: ShardedBatches) -> None:
        self.inner = inner
        self.batches = batches
        # Batches that workers hand over out of order cannot be matched with counts.
        self.in_order = inner.num_workers == 0 or getattr(inner, "in_order", True)

    def read(self, epoch: int, start: int, loaded: int = 0) -> Rounds:
        self.batches.epoch = epoch
        self.batches.start = start
        source = iter(self.inner)
        counts = self.batches.counts
        for position in count(start + loaded):
            parts = list(islice(source, len(self.batches.ranks)))
            if not parts:
                return
            known = counts.pop(position, None)
            yield parts, self._counts(parts, known)

    def _counts(self, parts: list[Any], known: BatchCounts | None) -> BatchCounts | None:
        if not self.batches.opaque and self.in_order:
            return known
        return measured(parts) if self.batches.plan.world_size == 1 else None


class ShardedStream(IterableDataset[Any]):
    """An iterable dataset that yields ``(parts of ranks, counts)``, one round at a time.

    Every process (and every worker process in it) iterates the whole user dataset and keeps its part.
    Attributes are read and written through to the user's dataset, because functions given as
    ``worker_init_fn`` set them on ``get_worker_info().dataset``.
    """

    _own = ("_dataset", "_plan", "_ranks", "_sample_batch_size", "_drop_last")

    def __init__(
        self,
        dataset: Iterable[Any],
        plan: ShardPlan,
        ranks: Sequence[int],
        sample_batch_size: int | None,
        drop_last: bool,
    ) -> None:
        self._dataset = dataset
        self._plan = plan
        self._ranks = tuple(ranks)
        self._sample_batch_size = sample_batch_size
        self._drop_last = drop_last

    def __getattr__(self, name: str) -> Any:
        # A state of the dataset alone would lack the first round that completes the last one.
        if name in (*self._own, "state_dict", "load_state_dict") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._dataset, name, value)

    def __iter__(self) -> Iterator[tuple[list[Any], BatchCounts | None]]:
        if self._sample_batch_size is None:
            yield from self._opaque_rounds()
            return
        batches = grouped(self._dataset, self._sample_batch_size, self._drop_last)
        for this in rounds(batches, self._plan):
            parts = [this.parts[rank] for rank in self._ranks]
            if all(parts):
                yield parts, this.counts

    def _opaque_rounds(self) -> Iterator[tuple[list[Any], BatchCounts | None]]:
        for this in rounds(([item] for item in self._dataset), self._plan):
            parts = [this.parts[rank] for rank in self._ranks]
            if all(parts):
                yield [part[0] for part in parts], _opaque_counts(this)


def _opaque_counts(this: Round[Any]) -> BatchCounts | None:
    """Counts of a round whose parts hold one ready-made batch each."""
    sizes = [row_count(part[0]) if part else 0 for part in this.parts]
    rows = tuple(size for size in sizes if size is not None)
    if len(rows) < len(sizes):
        return None
    real = tuple(size if whole else 0 for size, whole in zip(rows, this.counts.real, strict=True))
    return BatchCounts(rows=rows, real=real)


class CollateParts:
    """The user's ``collate_fn``, applied to each part of a round on its own."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, dealt: tuple[list[Any], BatchCounts | None]) -> tuple[list[Any], BatchCounts | None]:
        parts, counts = dealt
        return [self.collate_fn(part) for part in parts], counts


class StreamReader:
    """Reads a ``ShardedStream``; the counts travel with the batches, also out of worker processes."""

    def __init__(self, inner: DataLoader[Any]) -> None:
        self.inner = inner

    def read(self, epoch: int, start: int, loaded: int = 0) -> Rounds:
        skip = 0 if loaded else start
        for dealt in islice(iter(self.inner), skip, None):
            # Pinning turns the pair into a list.
            yield dealt[0], dealt[1]


class PlainReader:
    """Reads an iterable dataset in a world of one: torch's own semantics, every row is a sample."""

    def __init__(self, inner: DataLoader[Any]) -> None:
        self.inner = inner

    def read(self, epoch: int, start: int, loaded: int = 0) -> Rounds:
        skip = 0 if loaded else start
        for batch in islice(iter(self.inner), skip, None):
            yield [batch], measured([batch])


def measured(parts: list[Any]) -> BatchCounts | None:
    """Counts of one rank's batch in a world of one, read off its tensors."""
    size = row_count(parts[0])
    return None if size is None else BatchCounts(rows=(size,), real=(size,))


def row_count(batch: Any) -> int | None:
    """Rows of a collated batch; None if it holds no tensor that tells."""
    try:
        return find_batch_size(batch)
    except ValueError:
        return None
