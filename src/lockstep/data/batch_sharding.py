"""Which rows of the global order belong to which rank: arithmetic on lists, no processes.

The order arrives as batches. Every step takes one *round*: without ``split_batches`` it is W batches,
one a rank; with it, one batch cut into W contiguous slices. The rows of a round in rank order are the
next rows of the global order, so that with ``batch_size x W`` held fixed W does not change the order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, cycle, islice
from typing import Generic, TypeVar

from lockstep.errors import ConfigError
from lockstep.runtime.step import BatchCounts

T = TypeVar("T")


@dataclass(frozen=True)
class ShardPlan:
    """How batches are dealt to ``world_size`` ranks.

    ``batch_size`` is that of the user's loader (None: batches of varying size). ``drop_last`` drops the
    last round if it lacks batches; else ``even_batches`` completes it with samples from the beginning: to full
    batches, or with ``split_batches``, and where rank 0 has ``dispatched`` it, to the fewest rows of which every rank
    gets equally many.
    """

    world_size: int
    batch_size: int | None
    split_batches: bool = False
    even_batches: bool = True
    drop_last: bool = False
    dispatched: bool = False

    def __post_init__(self) -> None:
        if self.split_batches and self.batch_size is not None and self.batch_size % self.world_size:
            lower = self.batch_size - self.batch_size % self.world_size
            raise ConfigError(
                (
                    f"split_batches=True cuts each batch into {self.world_size} equal slices, but the batch size "
                    f"{self.batch_size} is not a round multiple of {self.world_size}. Use a batch size of "
                    f"{lower + self.world_size}"
                )
                + (f" or {lower}." if lower else ".")
            )

    @property
    def rank_batch_size(self) -> int | None:
        """Rows of a full batch on one rank."""
        if self.batch_size is None or not self.split_batches:
            return self.batch_size
        return self.batch_size // self.world_size

    @property
    def total_batch_size(self) -> int | None:
        """Rows of a full round over all ranks."""
        if self.batch_size is None or self.split_batches:
            return self.batch_size
        return self.batch_size * self.world_size

    @property
    def completes(self) -> bool:
        return self.even_batches and self.world_size > 1

    @property
    def beginning(self) -> int:
        """Number of batches at the beginning of the epoch that the last round may be completed from."""
        if not self.completes:
            return 0
        return 1 if self.split_batches else self.world_size

    def length(self, batches: int, rank: int, samples: int | None = None) -> int:
        """Return the number of batches that ``rank`` gets out of ``batches``.

        ``samples`` (rows in all) is needed only for uneven slices of a ragged last batch, which may
        leave the last ranks without one.
        """
        if not self.split_batches:
            # ceil(batches / W) if the last round is completed; else rank r is in it if it has more than r batches.
            missing = 0 if self.drop_last else self.world_size - 1
            if not self.drop_last and not self.even_batches:
                missing -= rank
            return (batches + missing) // self.world_size
        if self.completes or samples is None or not self.batch_size or not batches:
            return batches
        # Rows of the last batch. Ranks whose slice would begin behind them have none.
        last = samples - (batches - 1) * self.batch_size
        first_row = rank * (self.batch_size // self.world_size)
        return batches if last > first_row else batches - 1


@dataclass(frozen=True)
class GlobalBatch(Generic[T]):
    """One step of all ranks: ``parts[r]`` are the rows of rank ``r`` (empty: it has no batch)."""

    parts: tuple[list[T], ...]
    counts: BatchCounts


def rounds(
    batches: Iterable[Sequence[T]], plan: ShardPlan, beginning: Sequence[Sequence[T]] | None = None
) -> Iterator[GlobalBatch[T]]:
    """Deal ``batches`` to the ranks, round by round.

    ``beginning``: the first ``plan.beginning`` batches of the epoch, where ``batches`` are later ones.
    """
    if plan.split_batches:
        return _rounds_of_slices(batches, plan, beginning)
    return _rounds_of_batches(batches, plan, beginning)


def later(samples: Iterable[T], behind: int, beginning: int) -> tuple[list[T], Iterator[T]]:
    """Return the first ``beginning`` samples, and all that come behind the first ``behind``."""
    source = iter(samples)
    first = list(islice(source, beginning))
    return first, chain(first[behind:], islice(source, max(0, behind - len(first)), None))


def grouped(samples: Iterable[T], batch_size: int, drop_last: bool) -> Iterator[list[T]]:
    """Batches of ``batch_size`` samples; the last one may be smaller, unless dropped."""
    source = iter(samples)
    while batch := list(islice(source, batch_size)):
        if len(batch) == batch_size or not drop_last:
            yield batch


@dataclass
class CutSamples(Iterable[list[T]]):
    """Samples that are cut into batches of ``batch_size``; the last one may be smaller, unless dropped."""

    samples: Iterator[T]
    batch_size: int
    drop_last: bool

    def put_back(self, samples: list[T]) -> None:
        self.samples = chain(samples, self.samples)

    def __iter__(self) -> Iterator[list[T]]:
        return grouped(self.samples, self.batch_size, self.drop_last)


def _rounds_of_batches(
    batches: Iterable[Sequence[T]], plan: ShardPlan, beginning: Sequence[Sequence[T]] | None
) -> Iterator[GlobalBatch[T]]:
    first = [list(batch) for batch in beginning or ()]
    wanted = plan.beginning if beginning is None else 0
    collected: list[list[T]] = []
    for batch in batches:
        # Held back although complete: a batch was short, and only the last round is filled up.
        if len(collected) == plan.world_size:
            yield _as_they_are(collected, plan)
            collected = []
        collected.append(list(batch))
        if len(first) < wanted:
            first.append(list(batch))
        if len(collected) == plan.world_size and not _is_short(collected, plan):
            yield _as_they_are(collected, plan)
            collected = []
    if not collected or (plan.drop_last and len(collected) < plan.world_size):
        return
    if plan.completes and not plan.drop_last:
        yield _completed(collected, first, plan)
    else:
        yield _as_they_are(collected, plan)


def _is_short(collected: list[list[T]], plan: ShardPlan) -> bool:
    return plan.completes and plan.batch_size is not None and any(len(b) < plan.batch_size for b in collected)


def _as_they_are(collected: list[list[T]], plan: ShardPlan) -> GlobalBatch[T]:
    parts = (*collected, *([] for _ in range(plan.world_size - len(collected))))
    return GlobalBatch(parts, unpadded(tuple(map(len, parts))))


@lru_cache(maxsize=16)
def unpadded(sizes: tuple[int, ...]) -> BatchCounts:
    """Return the counts of a round in which each row is a sample."""
    return BatchCounts(rows=sizes, real=sizes)


def _completed(collected: list[list[T]], first: list[list[T]], plan: ShardPlan) -> GlobalBatch[T]:
    """Fill short batches with samples, or where sizes vary add whole batches, from the beginning."""
    if plan.dispatched:
        return _slices(list(chain.from_iterable(collected)), list(chain.from_iterable(first)), 0, plan)
    real = _as_they_are(collected, plan).counts.real
    parts: tuple[list[T], ...]
    if plan.batch_size is None:
        parts = tuple(islice(chain(collected, cycle(first)), plan.world_size))
    else:
        filling = cycle(chain.from_iterable(first))
        missing: list[list[T]] = [[] for _ in range(plan.world_size - len(collected))]
        parts = tuple(
            [*part, *islice(filling, max(0, plan.batch_size - len(part)))] for part in (*collected, *missing)
        )
    return GlobalBatch(parts, BatchCounts(rows=tuple(len(part) for part in parts), real=real))


def _rounds_of_slices(
    batches: Iterable[Sequence[T]], plan: ShardPlan, beginning: Sequence[Sequence[T]] | None
) -> Iterator[GlobalBatch[T]]:
    first: list[T] = list(beginning[0]) if beginning else []
    for batch in batches:
        first = first or list(batch)
        # Ranks of an uneven end have full slices or what is left.
        yield _slices(list(batch), first, 0 if plan.completes else plan.batch_size or 0, plan)


def _slices(rows: list[T], first: list[T], least: int, plan: ShardPlan) -> GlobalBatch[T]:
    """Cut ``rows`` into the smallest equal slices that hold them and ``least`` rows, filled from ``first``."""
    # Equal slices of as few rows as possible, so that the rows of a round in rank order are the next ones of the order.
    count = len(rows)
    per_rank = -(-max(least, count) // plan.world_size)
    if plan.completes:
        rows = [*rows, *islice(cycle(first), per_rank * plan.world_size - count)]
    starts = [rank * per_rank for rank in range(plan.world_size)]
    parts = tuple(rows[start : start + per_rank] for start in starts)
    real = tuple(max(0, min(per_rank, count - start)) for start in starts)
    return GlobalBatch(parts, BatchCounts(rows=tuple(len(part) for part in parts), real=real))
