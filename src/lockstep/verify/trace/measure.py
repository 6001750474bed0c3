"""How far what one rank holds of a tensor is from a trace: a few numbers, which add up over the parts of a tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from lockstep.comm.layout import ShardRegion
from lockstep.verify.trace.items import TraceItem

_CHUNK = 1 << 17
"""Elements that are compared at once, in float64: as many as fit into a core's cache."""


@dataclass(frozen=True)
class DistanceSums:
    """Over elements: of the squares of the difference, of what was found and of what was expected, and of products.

    ``wrong``: elements that are NaN, infinite or, of integers, other ones where the other run has none such.
    """

    elements: int = 0
    apart: float = 0.0
    found: float = 0.0
    expected: float = 0.0
    product: float = 0.0
    wrong: int = 0

    def __add__(self, other: DistanceSums) -> DistanceSums:
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return DistanceSums(*(mine + theirs for mine, theirs in pairs))

    def size(self, floor: float = 0.0) -> float:
        """Return the norm of what is expected, at least ``floor`` times the root of the elements."""
        return max(math.sqrt(self.expected), floor * math.sqrt(self.elements))

    def relative(self, floor: float = 0.0, wrong: float = 0.0) -> float:
        """Norm of the difference by that of what is expected, or by ``floor`` times the root of the elements.

        Infinite where more elements than the part ``wrong`` of all are wrong.
        """
        if self.wrong > wrong * self.elements:
            return math.inf
        size = self.size(floor)
        return math.sqrt(self.apart) / size if size else (math.inf if self.apart else 0.0)


@dataclass(frozen=True)
class Measured:
    """What one rank holds of an item, compared.

    Attributes:
        rank: Whose it is.
        boxes: Which elements of the whole: [offsets, shape] each.
        shape: That of the whole as found, where it is not the expected one.
        is_missing: The trace has no such item.
    """

    item: TraceItem
    rank: int
    sums: DistanceSums
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    shape: tuple[int, ...] | None = None
    is_missing: bool = False

    def to_json(self) -> str:
        """Return one line."""
        return json.dumps({**asdict(self), "item": self.item.key})

    @classmethod
    def from_json(cls, line: str) -> Measured:
        """Return what ``to_json`` wrote."""
        fields = json.loads(line)
        boxes = tuple((tuple(offsets), tuple(shape)) for offsets, shape in fields.pop("boxes"))
        shape = None if fields["shape"] is None else tuple(fields["shape"])
        sums, item = DistanceSums(**fields.pop("sums")), TraceItem.from_key(fields.pop("item"))
        return replace(cls(item, fields["rank"], sums), **{**fields, "boxes": boxes, "shape": shape})


class Limit(NamedTuple):
    """How far a tensor may be from the trace. ``relative`` infinite and ``wrong`` 1: it is not compared.

    Attributes:
        relative: The norm of the difference by the norm of what is expected, at most.
        floor: Root mean square of elements that is taken for that of what is expected where that is smaller.
        wrong: Part of the elements that may be wrong in the sense of ``Sums``.
        spread: What rounding explains; ``relative`` is a multiple of it.
    """

    relative: float = 0.0
    floor: float = 0.0
    wrong: float = 0.0
    spread: float = 0.0

    def distance(self, sums: DistanceSums) -> float:
        """Return the distance in the unit of ``relative``."""
        return sums.relative(self.floor, self.wrong)

    def ratio(self, sums: DistanceSums) -> float:
        """Return the distance, by what is allowed; more than 1: it differs."""
        # NaN and infinity are in no distance, and have a limit of their own.
        if sums.wrong > self.wrong * sums.elements:
            return math.inf
        distance = self.distance(sums)
        if distance == 0 or self.relative == math.inf:
            return 0.0
        return distance / self.relative if self.relative else math.inf


def read_measured(paths: Iterable[Path]) -> Iterator[Measured]:
    """Yield all lines of some files, but a last one that a process did not finish."""
    for path in paths:
        for line in path.read_text("utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                yield Measured.from_json(line)


def compare(found: torch.Tensor, expected: torch.Tensor) -> DistanceSums:
    """Return the sums over two tensors of one shape, in host memory; integers differ or not, floats by how much."""
    if not (found.is_floating_point() or expected.is_floating_point()):
        unequal = int((found != expected).sum())
        # Each element counts as 1: the relative distance is the root of the share of those that differ.
        return DistanceSums(
            found.numel(), unequal, found.numel(), found.numel(), found.numel() - unequal, unequal
        )
    total = DistanceSums()
    mine, theirs = found.reshape(-1), expected.reshape(-1)
    # Chunks, since double precision takes two to four times the memory of the tensors.
    for start in range(0, mine.numel(), _CHUNK):
        total += _sums(mine[start : start + _CHUNK].double(), theirs[start : start + _CHUNK].double())
    return total


def _sums(found: torch.Tensor, expected: torch.Tensor) -> DistanceSums:
    sums = _finite_sums(found, expected)
    # The usual case costs no masks: one NaN or infinity makes a sum so, too.
    if math.isfinite(sums.apart + sums.found + sums.expected):
        return sums
    # NaN in both is the same number here; one on one side alone is wrong, and neither is in the sums.
    same = (found == expected) | (found.isnan() & expected.isnan())
    finite = found.isfinite() & expected.isfinite()
    wrong = int((~same & ~finite).sum())
    return replace(_finite_sums(found.where(finite, 0.0), expected.where(finite, 0.0)), wrong=wrong)


def _finite_sums(found: torch.Tensor, expected: torch.Tensor) -> DistanceSums:
    apart = found - expected
    return DistanceSums(
        found.numel(),
        float(apart.dot(apart)),
        float(found.dot(found)),
        float(expected.dot(expected)),
        float(found.dot(expected)),
    )


def as_regions(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[ShardRegion]:
    """Return the regions of which ``as_pairs`` has told offsets and shape, with where they are in the local part."""
    if not pairs:
        return []
    # A part is cut along each dimension on its own: its ranges there follow one another, in the order of the whole.
    starts: list[dict[int, int]] = []
    for dim in range(len(pairs[0][0])):
        lengths = {offsets[dim]: shape[dim] for offsets, shape in pairs}
        ends = [0, *accumulate(lengths.values())]
        starts.append(dict(zip(lengths, ends, strict=False)))
    return [
        ShardRegion(
            tuple(offsets), tuple(shape), tuple(starts[dim][start] for dim, start in enumerate(offsets))
        )
        for offsets, shape in pairs
    ]


def as_pairs(regions: Sequence[ShardRegion]) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Offsets and shape of each region."""
    return tuple((region.offsets, region.shape) for region in regions)
