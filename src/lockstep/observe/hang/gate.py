"""What lets the main thread of a rank pass step boundaries, and holds it where all ranks are to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lockstep.runtime.clock import StepClock


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
        self._target = 0
        self._has_target = threading.Event()
        clock.at_boundary = self.arrive

    def close(self, cause: str) -> int:
        """Want a stop; returns the boundary passed last. Called by a side thread.

        The main thread counts a boundary before it looks whether a stop is wanted, and this looks at the count after
        it has wanted one: whatever the order, a boundary beyond the returned one is not passed.
        """
        # Asked again by a coordinator that was out of reach: the main thread may wait for this one already.
        self._cause = self._cause or cause
        return self._clock.boundaries

    def aim(self, boundary: int) -> None:
        """Stop at this boundary, if a stop is wanted."""
        if self._cause is not None:
            self._target = boundary
            self._has_target.set()

    def arrive(self, boundary: int) -> None:
        """Hold the main thread at a boundary until it may go on."""
        # Where nobody answers, whoever wanted the stop ends the process in the end.
        if self._cause is not None and self._has_target.wait(self._limit_s) and boundary >= self._target:
            self._stop(self._cause)
