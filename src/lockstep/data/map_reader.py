"""Read a map-style dataset: a batch sampler deals indices, and torch's loader fetches what they stand for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Sized
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Sampler

from lockstep.data.arrival import SeededIndex
from lockstep.data.order import GlobalOrder
from lockstep.data.position import Behind, nothing
from lockstep.data.readers import Begin, Dealt, Rounds, measured, seed_workers
from lockstep.data.shard import Round, ShardPlan, rounds
from lockstep.runtime.step import BatchCounts


class Announced(NamedTuple):
    """What is known of a round when its indices are dealt; see ``Dealt``."""

    counts: BatchCounts
    last: bool
    behind: Behind | None


class ShardedBatches(Sampler[Any]):
    """A batch sampler that yields the batches of ``ranks``, in turn, out of the global order.

    It looks one round ahead, in the order alone. ``begin`` and ``plan`` hold for the iterations that start after they
    are set; ``announced`` are the rounds of the latest one whose indices were dealt. With ``workers`` the batches are
    for so many worker processes, and seed their generators.
    """

    def __init__(self, order: GlobalOrder, plan: ShardPlan, ranks: Sequence[int], workers: int) -> None:
        self.order = order
        self.plan = plan
        self.ranks = tuple(ranks)
        self.workers = workers
        self.begin = Begin(order.seed, 0, nothing(1))
        self.announced: deque[Announced] = deque()

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

    def __iter__(self) -> Iterator[Any]:
        # Not a generator itself: what holds now holds for this iteration, whenever its first batch is asked for.
        self.announced = deque()
        return self._batches(self.begin, self.plan, self.announced)

    def _batches(self, begin: Begin, plan: ShardPlan, announced: deque[Announced]) -> Iterator[Any]:
        order = replace(self.order, seed=begin.seed)
        # A state of torchdata counts from where this dealing began.
        [samples] = begin.behind.samples if begin.inner is None else begin.behind.base
        first, later = order.batches(begin.epoch, samples, plan.beginning)
        dealt = rounds(later, plan, first)
        for left_out in islice(dealt, begin.left_out):
            samples += left_out.counts.total
        base, done = (samples,), 0
        following = next(dealt, None)
        coming = self._own_parts(following)
        while following is not None:
            this, following = following, next(dealt, None)
            parts, coming = coming, self._own_parts(following)
            start = samples
            samples += this.counts.total
            done += 1
            if not parts:
                continue
            behind = None if following is None else Behind((samples,), base, (done,))
            announced.append(Announced(this.counts, not coming, behind))
            for rank, part in parts:
                index = part[0] if order.opaque else part
                if self.workers:
                    key = (begin.seed, begin.epoch, start + sum(this.counts.rows[:rank]))
                    # The first batches of an iteration go to the workers one by one.
                    index = SeededIndex(index, key, begin.epoch if done <= self.workers else None)
                yield index

    def _own_parts(self, dealt: Round[Any] | None) -> list[tuple[int, list[Any]]]:
        """Rank and rows, for those of ``ranks`` that have a batch in this round."""
        return (
            [] if dealt is None else [(rank, dealt.parts[rank]) for rank in self.ranks if dealt.parts[rank]]
        )

    def __len__(self) -> int:
        batches = len(self.order)
        return sum(self.plan.length(batches, rank, sample_count(self.order.sampler)) for rank in self.ranks)


def sample_count(batch_sampler: Any) -> int | None:
    """Number of indices a batch sampler draws in an epoch, where it can be known."""
    sampler = getattr(batch_sampler, "sampler", None)
    return len(sampler) if isinstance(sampler, Sized) else None


class MapReader:
    """Reads a map-style dataset. What is known of a round stays in this process: batches arrive in order."""

    def __init__(self, inner: DataLoader[Any], batches: ShardedBatches, keeps_inner_state: bool) -> None:
        self.inner = inner
        self.batches = batches
        self.keeps_inner_state = keeps_inner_state
        # Batches that workers hand over out of order cannot be matched with what was announced of them.
        self.has_position = inner.num_workers == 0 or getattr(inner, "in_order", True)

    def read(self, begin: Begin) -> Rounds:
        seed_workers(self.inner, begin)
        self.batches.begin = begin
        loaded = 0
        if begin.inner is not None:
            # The order is dealt from the base, and torchdata leaves out what came after that.
            self.inner.load_state_dict(begin.inner)  # type: ignore[attr-defined]
            [loaded] = begin.behind.rounds
        source = iter(self.inner)
        announced = self.batches.announced
        width = len(self.batches.ranks)
        exact = self.has_position and not self.batches.order.opaque
        alone = self.batches.plan.world_size == 1
        dealt = ([batch] for batch in source) if width == 1 else iter(lambda: list(islice(source, width)), [])
        for parts in dealt:
            # They were announced when torchdata left them out, just now.
            for _ in range(loaded):
                announced.popleft()
            loaded = 0
            counts: BatchCounts | None
            counts, last, behind = announced.popleft()
            if not exact:
                counts = measured(parts[0]) if alone else None
            inner = self.inner.state_dict() if self.keeps_inner_state else None  # type: ignore[attr-defined]
            yield Dealt(parts, counts, last, behind, inner)
