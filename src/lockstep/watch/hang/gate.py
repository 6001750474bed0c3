"""Holds this process at a step boundary until all ranks know at which one they stop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lockstep.runtime.step_clock import StepClock


class StopGate:
    """Lets the main thread pass step boundaries, until a stop is wanted.

    Then this rank says which boundary it passed last and passes no other one before it knows the target: the first
    that no rank has passed. So all ranks stop at the same one, without a collective in any step.

    Args:
        clock: Whose boundaries.
        stop: Called by the main thread at the target with the stop's cause; does not return.
        limit_s: How long to wait at a boundary for the target.
    """

    def __init__(self, clock: StepClock, stop: Callable[[str], None], limit_s: float = 30.0) -> None:
        self._clock = clock
        self._stop = stop
        self._limit_s = limit_s
        self._cause: str | None = None
        self._target: int | None = None
        self._known = threading.Event()
        clock.at_boundary = self.arrive

    def close(self, cause: str) -> int:
        """Want a stop; returns the boundary passed last. Called by a side thread.

        The main thread counts a boundary before it looks whether a stop is wanted, and this looks at the count after
        it has wanted one: whatever the order, a boundary beyond the returned one is not passed.
        """
        self._cause = cause
        return self._clock.boundaries

    def aim(self, boundary: int) -> None:
        """Stop at this boundary."""
        self._target = boundary
        self._known.set()

    def arrive(self, boundary: int) -> None:
        """The main thread is at a boundary; returns when it may go on."""
        if self._cause is None:
            return
        if not self._known.wait(self._limit_s):
            return  # nobody answers; whoever wanted the stop ends the process in the end
        if self._target is not None and boundary >= self._target:
            self._stop(self._cause)
