"""Values that rounding puts on the other side of a kink: a ReLU, a maximum.

In fp32 one element in millions is as close to a kink as that, so that the disturbed run need not show one where the
candidate does. Such an element's gradient is zero in one run and not in the other, while all others agree. What comes
after it, in backward and in later steps, moves by more than rounding explains of the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from lockstep.verify.judge.patterns import RankPart
from lockstep.verify.rounding import LARGE
from lockstep.verify.trace.items import ItemKind, TraceItem
from lockstep.verify.trace.measure import Limit, compare

MOST = 3
"""Elements of a tensor that may be switched; of large ones this part of all: ..."""
MOST_OF_LARGE = 1e-4
MOST_OF_SMALL = 0.02
"""... and of small ones at most this, as a whole row that is zero is something else."""
TIMES = 5
"""What comes before a module in backward moves by at most so many times more than its gradient."""


def are_switched(differing: Iterable[RankPart], limit: Limit) -> bool:
    """Return whether parts of a gradient agree but for a few elements that are zero in one run alone."""
    parts = [one for one in differing if one.found.shape == one.expected.shape]
    return bool(parts) and all(_is_switched(one, limit) for one in parts)


def _is_switched(part: RankPart, limit: Limit) -> bool:
    found, expected = part.found.reshape(-1), part.expected.reshape(-1)
    if not found.is_floating_point() or not bool(found.isfinite().all()):
        return False
    # The gradient of what a ReLU or a maximum has cut off is exactly zero.
    switched = (found == 0) != (expected == 0)
    number = int(switched.sum())
    if number > min(max(MOST, MOST_OF_LARGE * len(found)), MOST_OF_SMALL * len(found)):
        return False
    # But for those elements the two must agree.
    return limit.ratio(compare(torch.where(switched, expected, found), expected)) <= 1


class Kinks:
    """What follows from elements that were switched, as they are found in the order of the run."""

    def __init__(self) -> None:
        self.items: list[TraceItem] = []
        self._of_step: dict[int, float] = {}

    def add(self, item: TraceItem, distance: float) -> None:
        """Add a gradient that is ``distance`` off by elements that were switched."""
        self.items.append(item)
        # Elements at different kinks have nothing to do with each other: their squares add up.
        self._of_step[item.step] = math.hypot(self._of_step.get(item.step, 0.0), distance)

    def widened(self, item: TraceItem, limit: Limit) -> Limit:
        """Return what is allowed of an item that comes after them."""
        if not self._of_step or item.kind in (ItemKind.BATCH, ItemKind.RATE):
            return limit
        # In its own step an item moves with the gradients, in later ones by the weights that they have moved.
        here = TIMES * self._of_step.get(item.step, 0.0)
        before = TIMES * math.hypot(*(far for step, far in self._of_step.items() if step < item.step))
        # Adam turns gradients that are that small relative to others around.
        more = (
            2 * math.sqrt(before + (here if item.kind in (ItemKind.UPDATE, ItemKind.BUFFER) else 0.0)) + here
        )
        return limit._replace(relative=max(limit.relative, min(LARGE, limit.relative + more)))
