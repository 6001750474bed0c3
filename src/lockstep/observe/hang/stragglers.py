"""Which ranks hold up the others without standing still: the time that each works between collectives, compared.

In synchronous training all ranks' steps take equally long. What tells a slow rank is its local time: that of its step
without the waits for other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

SLOWER = 1.5
SHARE_OF_STEP = 0.1


@dataclass(frozen=True)
class Straggler:
    """A slow rank. ``ratio``: its local time over the median of the other ranks' local times."""

    rank: int
    ratio: float


def find_stragglers(local_s: Mapping[int, float], step_s: float) -> list[Straggler]:
    """The ranks whose local time is at least 1.5 times the median of the other ranks', slowest first.

    What they take longer than that median is at least 10% of the step, or it would not matter.

    Args:
        local_s: Rank -> its usual seconds of local work per step, best as a median over some steps: one step alone
            says little. Ranks without a finite number above 0 are left out.
        step_s: Seconds per step.
    """
    known = {rank: seconds for rank, seconds in local_s.items() if math.isfinite(seconds) and seconds > 0}
    found = []
    for rank, seconds in known.items():
        others = [other for another, other in known.items() if another != rank]
        if not others:
            break
        usual = median(others)
        if seconds >= SLOWER * usual and seconds - usual >= SHARE_OF_STEP * step_s:
            found.append(Straggler(rank, seconds / usual))
    return sorted(found, key=lambda one: (-one.ratio, one.rank))
