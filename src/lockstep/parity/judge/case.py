"""One tensor that differs: what ranks hold of it, what they should hold, and how close is close enough to name it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lockstep.parity.judge.facts import RunFacts
from lockstep.parity.trace.file import Trace
from lockstep.parity.trace.items import TraceItem
from lockstep.parity.trace.measure import DistanceSums, as_regions, compare

CLOSE = 1e-3
"""A shape of a difference is named if what it leaves is at most this, relative to the norm of what was found, ..."""
TIMES_ALLOWED = 3
"""... or so many times what rounding explains, if that is more, ..."""
PART = 0.3
"""... and at most this part of the difference itself."""


@dataclass(frozen=True)
class RankPart:
    """What a rank holds of a tensor that differs, and what it should.

    Attributes:
        boxes: Which elements of the whole they are; (): all.
    """

    rank: int
    found: Tensor
    expected: Tensor
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Case:
    """A tensor that differs.

    Attributes:
        parts: Those that differ.
        agreeing: Ranks whose part agrees.
        allowed: The relative distance that rounding explains, times the multiple.
    """

    item: TraceItem
    parts: tuple[RankPart, ...]
    agreeing: tuple[int, ...]
    allowed: float
    trace: Trace
    facts: RunFacts

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(one.rank for one in self.parts)

    @cached_property
    def sums(self) -> DistanceSums:
        """Over all parts that differ."""
        return sum((compare(one.found, one.expected) for one in self.parts), DistanceSums())

    @cached_property
    def near(self) -> float:
        """How much a shape may leave unexplained, relative to the norm of what it says."""
        found = max(self.sums.expected, self.sums.found)
        distance = math.sqrt(self.sums.apart / found) if found else 0.0
        return min(max(TIMES_ALLOWED * self.allowed, CLOSE), PART * distance)

    def is_close(self, found: Tensor, expected: Tensor, near: float | None = None) -> bool:
        """Whether two tensors of one shape are the same but for what may be left."""
        if found.shape != expected.shape:
            return False
        sums = compare(found, expected)
        limit = self.near if near is None else near
        return not sums.wrong and sums.expected > 0 and sums.apart <= limit**2 * sums.expected

    def all_close(self, what: Callable[[RankPart], Tensor | None]) -> bool:
        """Whether each part is what ``what`` says, all together."""
        total = DistanceSums()
        for one in self.parts:
            expected = what(one)
            if expected is None or expected.shape != one.found.shape:
                return False
            total += compare(one.found, expected)
        return not total.wrong and total.expected > 0 and total.apart <= self.near**2 * total.expected

    def part_of(self, item: TraceItem, like: RankPart) -> Tensor | None:
        """What the rank would hold of another item of the trace."""
        if item not in self.trace or self.trace.shape(item) != self.trace.shape(self.item):
            return None
        return part(self.trace, item, like.boxes)


def part(trace: Trace, item: TraceItem, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    """What a rank has of an item if it has these boxes of it; none: all."""
    regions = as_regions(pairs)
    # One box is a view of the trace; several need a tensor that has them beside each other.
    if len(regions) < 2:
        return trace.part(item, regions[0]) if regions else trace.tensor(item)
    # The rank's part is as large as its boxes reach.
    ends = ([a + b for a, b in zip(region.inside, region.shape, strict=True)] for region in regions)
    shape = tuple(map(max, zip(*ends, strict=True)))
    first = trace.part(item, regions[0])
    whole = first.new_empty((*shape, *first.shape[len(shape) :]))
    for region in regions:
        region.local_view(whole).copy_(trace.part(item, region))
    return whole


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All elements of some tensors of any shape, [numel of all], in double precision."""
    return torch.cat([one.reshape(-1).double() for one in tensors])
