"""Which part of a step the main thread is in: one at a time, so that the parts sum to the time that passed."""

from __future__ import annotations

import time
from collections.abc import Callable

PARTS = (
    "data",
    "to_device",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "save",
    "wait",
    "inference",
    "other",
)
"""Waiting for a batch; moving it; training forwards and what follows until backward; backward; collectives that the
main thread waits for; optimizers, their clipping and clearing; checkpoints; ``wait_for_everyone``; calls of prepared
models without gradients; what is left, which is the script's own."""


class Parts:
    """Seconds in each part since this was made, as the main thread sees them.

    Belongs to the main thread. ``enter`` takes 0.3 µs. ``at_enter`` is called with each part that begins.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._part = "other"
        self._since = now()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self.at_enter: Callable[[str], None] | None = None

    @property
    def part(self) -> str:
        """In which it is now. May be asked by any thread."""
        return self._part

    def enter(self, part: str) -> str:
        """From now on it is this part; returns the one before."""
        now = self._now()
        before = self._part
        self._seconds[before] += now - self._since
        self._since = now
        self._part = part
        if self.at_enter is not None:
            self.at_enter(part)
        return before

    def read(self) -> dict[str, float]:
        """Seconds in each part until now."""
        self.enter(self._part)
        return dict(self._seconds)

    def read_entered(self) -> dict[str, float]:
        """Seconds in each part until the one that it is in now began."""
        return dict(self._seconds)


def difference(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Seconds in each part between two readings; parts that took none are left out."""
    return {part: seconds - before[part] for part, seconds in now.items() if seconds > before[part]}
