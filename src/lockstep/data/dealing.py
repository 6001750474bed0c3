"""Deals the rounds of one iteration to the ranks of a reader, and announces what is known of each round."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import TypeVar

from lockstep.data.batch_sharding import CutSamples, GlobalBatch, ShardPlan, rounds, unpadded
from lockstep.data.drawn import DrawnOrder
from lockstep.data.position import new_progress
from lockstep.data.readers import ReadRound, new_round

T = TypeVar("T")


def at_first_item(make: Callable[[], Iterator[T]]) -> Iterator[T]:
    """Return what ``make`` returns, called when the first item is asked for. The items pass through no Python code."""
    return chain.from_iterable(made() for made in (make,))


@dataclass
class Dealing:
    """The batches that ``ranks`` get in one iteration, in turn; ``announced`` gets each round as it is dealt.

    They begin behind ``samples`` of the global order, and ``left_out`` rounds later. ``order``: the samplers draw it.
    For worker processes ``mark(index, place, number)`` makes what is sent, of the index of a batch, where it begins in
    the global order, and the number of its round, from 1. None: batches are read in this process.
    """

    plan: ShardPlan
    ranks: Sequence[int]
    order: DrawnOrder | None
    opaque: bool
    announced: deque[ReadRound]
    mark: Callable[[object, int, int], object] | None
    samples: int
    left_out: int
    base: tuple[int] | None = None
    rounds: int = 0

    def batches(
        self,
        later: Iterable[Sequence[object]],
        first: Sequence[Sequence[object]],
    ) -> Iterator[object]:
        """Yield batches: ``later`` are the batches that are dealt, and ``first`` those that may complete the last
        round.

        Most rounds are cut out of the samples directly, in few calls. ``batch_sharding.rounds`` deals all others.
        """
        if not isinstance(later, CutSamples):
            return self._rounds_with_ends(rounds(later, self.plan, first))
        cut = later
        last = at_first_item(lambda: self._rounds_with_ends(rounds(cut, self.plan, first)))
        known = None if self.order is None or self.plan.world_size > 1 else self.order.known_samples()
        if cut.batch_size != self.plan.batch_size:
            return last
        return chain(self._whole(cut, known), last)

    def _whole(self, cut: CutSamples[object], known: int | None) -> Iterator[object]:
        """Yield rounds of which the next one is whole, too: as many as the ``known`` length says, or by reading one
        ahead.

        To look ahead in a process on its own would draw what the next batch needs before this one is trained on.
        """
        plan, ranks, order = self.plan, self.ranks, self._digesting()
        size = plan.rank_batch_size
        assert size is not None
        total = size * plan.world_size
        counts = unpadded((size,) * plan.world_size)
        parts = [(rank * size, slice(rank * size, (rank + 1) * size)) for rank in ranks]
        mark = self.mark
        announce = self.announced.append
        # A list of ``total`` samples for each round, made without a call of Python code.
        taken = map(list, map(islice, repeat(cut.samples), repeat(total)))
        looks_ahead = known is None
        rows = next(taken) if looks_ahead else []
        # All whole rounds but the last one, which may end the epoch: ``_rounds_with_ends`` says so.
        for _ in repeat(None) if known is None else range((known - self.samples) // total - 1):
            following = next(taken)
            if len(following) < total:
                rows += following
                break
            this, rows = (rows, following) if looks_ahead else (following, rows)
            start = self.samples
            self.samples = behind = start + total
            digest = None if order is None else order.digested(this)
            if self.left_out:
                self.left_out -= 1
                continue
            base = self.base = self.base or (start,)
            self.rounds = number = self.rounds + 1
            progress = new_progress(((behind,), base, (number,), 0, (0,)))
            announce(new_round((counts, False, progress, digest, None)))
            for offset, part in parts:
                index = this[part]
                yield index if mark is None else mark(index, start + offset, number)
        cut.put_back(rows)

    def _rounds_with_ends(self, batches: Iterator[GlobalBatch[object]]) -> Iterator[object]:
        """Yield the rounds with their ends."""
        for left_out in islice(batches, self.left_out):
            self._pass(left_out)
        base = self.base = self.base or (self.samples,)
        for this, is_over, coming in self._with_ends(batches):
            start = self.samples
            digest = self._pass(this)
            self.rounds += 1
            parts = self._own_parts(this)
            if not parts:
                continue
            behind = None if is_over else new_progress(((self.samples,), base, (self.rounds,), 0, (0,)))
            self.announced.append(new_round((this.counts, not coming, behind, digest, None)))
            for rank, part in parts:
                index = part[0] if self.opaque else part
                if self.mark is not None:
                    index = self.mark(index, start + sum(this.counts.rows[:rank]), self.rounds)
                yield index

    def _with_ends(
        self, batches: Iterator[GlobalBatch[object]]
    ) -> Iterator[tuple[GlobalBatch[object], bool, bool]]:
        """Yield each round, whether the epoch is over with it, whether these ranks have a batch in the next one."""
        samples, order = self.samples, self.order
        if order is not None and self.plan.world_size == 1 and order.is_over(samples) is not None:
            # See _whole for why nothing is read ahead.
            for this in batches:
                samples += this.counts.total
                is_over = bool(order.is_over(samples))
                yield this, is_over, not is_over
            return
        following = next(batches, None)
        while following is not None:
            this, following = following, next(batches, None)
            yield this, following is None, bool(self._own_parts(following))

    def _pass(self, this: GlobalBatch[object]) -> int | None:
        """Count the samples of a round, and return the checksum of those up to its end."""
        self.samples += this.counts.total
        order = self._digesting()
        return (
            None
            if order is None
            else order.digested(chain.from_iterable(map(islice, this.parts, this.counts.real)))
        )

    def _digesting(self) -> DrawnOrder | None:
        """Return the order, where what is behind must be told from what another sampler gives."""
        return None if self.order is None or self.order.digest is None else self.order

    def _own_parts(self, batch: GlobalBatch[object] | None) -> list[tuple[int, list[object]]]:
        """Return rank and rows, for those of ``ranks`` that have a batch in this round."""
        return (
            [] if batch is None else [(rank, batch.parts[rank]) for rank in self.ranks if batch.parts[rank]]
        )
