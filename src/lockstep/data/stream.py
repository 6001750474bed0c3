"""Read an iterable dataset: the process, or each of its workers, deals the stream and keeps its ranks' part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info, graph_settings

from lockstep.data.batch_sharding import GlobalBatch, ShardPlan, grouped, rounds
from lockstep.data.fingerprint import digest_of
from lockstep.data.order import announce_epoch_to
from lockstep.data.position import Progress
from lockstep.data.readers import row_count
from lockstep.data.rng import mixed_seed, seed_generators
from lockstep.errors import CheckpointError
from lockstep.runtime.step import BatchCounts

# What a stream yields: number of the worker, samples in the round, batches of its ranks (None: one has none), counts,
# checksum of the stream behind it. A round of no samples only passes the turn to the next worker.
WorkerMessage = tuple[int, int, "list[object] | None", "BatchCounts | None", int]


class StreamStart:
    """Where the workers' streams begin, in memory that they share: workers that persist get no new dataset."""

    def __init__(self, workers: int) -> None:
        self.streams = max(1, workers)
        self.numbers = torch.zeros(5 + 3 * self.streams, dtype=torch.int64)
        if workers:
            self.numbers.share_memory_()

    def give(self, seed: int, epoch: int, behind: Progress, pipe_seed: int, seeds_workers: bool) -> None:
        """Set them. ``pipe_seed`` is for data pipes; with ``seeds_workers``, torch's seeds of workers are replaced."""
        # Seeds are unsigned, and the shared tensor is int64.
        signed = [(number + 2**63) % 2**64 - 2**63 for number in (seed, pipe_seed)]
        numbers = [*signed, epoch, int(seeds_workers), behind.turn]
        self.numbers.copy_(torch.tensor([*numbers, *behind.base, *behind.rounds, *behind.digests]))

    def take(self) -> tuple[int, int, bool, int, Progress]:
        """Return seed, epoch, whether workers are seeded, the seed of data pipes, and the progress."""
        seed, pipe_seed, epoch, seeds_workers, turn = self.numbers[:5].tolist()
        base, done, digests = map(tuple, self.numbers[5:].view(3, -1).tolist())
        behind = Progress(base, base, done, turn, digests)
        return seed, epoch, bool(seeds_workers), pipe_seed, behind


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

    def __getattr__(self, name: str) -> Any:
        if name in self._own or name.startswith("__"):
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
        seed, epoch, seeds_workers, pipe_seed, behind = self._stream_start.take()
        number = 0 if worker is None else worker.id
        if worker is not None:
            if seeds_workers:
                seed_generators(mixed_seed(seed, epoch, number))
            announce_epoch_to(self._dataset, seed, epoch, seeds_workers)
        if isinstance(self._dataset, IterDataPipe):
            # What torch's loader does for one that it holds itself.
            graph_settings.apply_random_seed(self._dataset, torch.Generator().manual_seed(pipe_seed))
            if worker is not None:
                graph_settings.apply_sharding(self._dataset, worker.num_workers, worker.id)
        return self._messages(number, behind, iter(self._dataset))

    def _messages(self, number: int, behind: Progress, samples: Iterator[object]) -> Iterator[WorkerMessage]:
        # torch's loader begins with worker 0, so workers before the one whose turn it is pass it on.
        if number < behind.turn:
            yield number, 0, None, None, behind.digests[number]
        digest, dealt = self._rounds(behind.base[number], samples)
        left_out, saved = behind.rounds[number], behind.digests[number]
        made = 0
        for made, this in enumerate(dealt, 1):
            if made == left_out + 1:
                self._check(digest, saved)
            real = zip(this.parts, this.counts.real, strict=True)
            digest = digest_of(chain.from_iterable(part[:count] for part, count in real), digest)
            parts = [this.parts[rank] for rank in self._ranks]
            # Made although it was handed out before: it may draw random numbers.
            batches, counts = self._collated(parts, this)
            if made > left_out:
                yield number, this.counts.total, batches, counts, digest
        if made <= left_out:
            self._check(digest, saved)

    def _check(self, digest: int, saved: int) -> None:
        """Raise CheckpointError where reading up to the position has given other samples than the saved run had."""
        if saved not in (-1, digest):
            raise CheckpointError(
                f"{type(self._dataset).__name__} does not give the samples up to the position again: it has random "
                "numbers of its own, or its data changed. Give its shuffle a seed, or make its order a function of "
                "set_epoch(epoch). Or start a new epoch with loader.set_epoch(loader.epoch + 1)."
            )

    def _rounds(self, behind: int, samples: Iterator[object]) -> tuple[int, Iterator[GlobalBatch[object]]]:
        """Return the checksum of what is ``behind``, and the rounds after it."""
        size = self._sample_batch_size or 1
        first = list(islice(samples, self._plan.beginning * size))
        digest = digest_of(first[:behind], 0)
        for passed in grouped(islice(samples, max(0, behind - len(first))), 256, drop_last=False):
            digest = digest_of(passed, digest)
        beginning = list(grouped(first, size, drop_last=False))
        rest = chain(first[behind:], samples)
        return digest, rounds(grouped(rest, size, self._drop_last), self._plan, beginning)

    def _collated(
        self, parts: Sequence[Sequence[object]], this: GlobalBatch[object]
    ) -> tuple[list[object] | None, BatchCounts | None]:
        if not all(parts):
            return None, None
        if self._sample_batch_size is not None:
            return [self._collate_fn(part) for part in parts], this.counts
        return [self._collate_fn(part[0]) for part in parts], _opaque_counts(this)


def _opaque_counts(this: GlobalBatch[object]) -> BatchCounts | None:
    """Return the counts of a round whose parts hold one ready-made batch each."""
    sizes = [row_count(part[0]) if part else 0 for part in this.parts]
    rows = tuple(size for size in sizes if size is not None)
    if len(rows) < len(sizes):
        return None
    real = tuple(size if whole else 0 for size, whole in zip(rows, this.counts.real, strict=True))
    return BatchCounts(rows=rows, real=real)


def as_it_is(message: object) -> object:
    """Return the ``collate_fn`` of a loader whose dataset collates."""
    return message
