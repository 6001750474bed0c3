"""Time as a process counts it that may have been stopped meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_GAP_S = 1.0


class AwakeClock:
    """Seconds during which this process was awake, as far as it looked at this clock.

    What lies between two looks counts as 1 s at most: for the rest the process was stopped, or got no processor, and
    could hear nobody. So whoever judges the silence of others by this clock looks at it a few times a second.

    Args:
        now: Monotonic seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last = now()
        self._awake_s = 0.0

    def __call__(self) -> float:
        now = self._now()
        self._awake_s += min(max(now - self._last, 0.0), LONGEST_GAP_S)
        self._last = now
        return self._awake_s
