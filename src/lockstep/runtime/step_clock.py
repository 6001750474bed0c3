"""What the main thread of this process gets done, in plain counters that a side thread may read at any time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

RECENT_STEPS = 50


class StepClock:
    """Counts batches, backward passes and optimizer steps, and finds the boundaries between steps.

    A boundary is the moment at which the loop asks for the next batch after at least one optimizer step: nothing of
    the step before is left to do, and the script's own counters agree with the state. Costs a few attribute writes
    a step; written by the main thread alone.

    ``ticks`` grows with everything that gets done. ``durations_s`` are those of the latest steps, from boundary to
    boundary; ``local_s`` how long each took from its boundary to its backward pass, when other ranks are not waited
    for by plain data parallelism.
    """

    def __init__(self) -> None:
        self.ticks = 0
        self.steps = 0
        self.boundaries = 0
        self.durations_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self.local_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self.at_boundary: Callable[[int], None] | None = None
        self._stepped = False
        self._began: float | None = None
        self._forward_s = 0.0
        self._asked: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "at_boundary": None}  # a copy counts, but stops nothing

    def batch_wanted(self) -> None:
        """The loop asks a prepared loader for its next batch."""
        self.ticks += 1
        if not self._stepped:
            self._asked = self._asked or time.perf_counter()
            return
        self._stepped = False
        self.boundary()

    def boundary(self) -> None:
        """A step is complete."""
        now = time.perf_counter()
        if self._began is not None:
            self.durations_s.append(now - self._began)
            self.local_s.append(self._forward_s)
        self.boundaries += 1
        if self.at_boundary is not None:
            self.at_boundary(self.boundaries)
            now = time.perf_counter()  # what was done there is not part of a step
        self._began = self._asked = now
        self._forward_s = 0.0

    def backward_begins(self) -> None:
        """The forward pass of a micro-batch is done."""
        self.ticks += 1
        if self._asked is not None:
            self._forward_s += time.perf_counter() - self._asked
            self._asked = None

    def stepped(self) -> None:
        """An optimizer made a step."""
        self.ticks += 1
        self.steps += 1
        self._stepped = True

    @property
    def slowest_s(self) -> float:
        """Seconds of the slowest of the latest steps; 0 before there are any."""
        return max(list(self.durations_s), default=0.0)
