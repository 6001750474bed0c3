"""What lets the main thread of a rank pass step boundaries, and holds it where all ranks are to do the same."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lockstep.runtime.clock import StepClock


class CommonBoundary:
    """One boundary that all ranks are to agree on. Written by a side thread, waited for by the main one.

    Attributes:
        cause: Why.
        target: The boundary; None: not known yet, or, once it is ``known``, there will be none.
    """

    def __init__(self, cause: str) -> None:
        self.cause = cause
        self.target: int | None = None
        self.known = threading.Event()

    def set_target(self, target: int | None) -> None:
        """It is this one; None: they do not agree on any."""
        self.target = target
        self.known.set()


class StopGate:
    """Lets the main thread pass step boundaries, until a stop or a save is wanted.

    Then this rank says which boundary it passed last and passes no other one before it knows the target: the first
    that no rank has passed. So all ranks stop, or save, at the same one, without a collective in any step.

    Args:
        clock: Whose boundaries.
        stop: Called by the main thread at the target with the stop's cause; does not return.
        limit_s: How long to wait at a boundary for the target.
        save: Called by the main thread at the target of a save; training goes on after it.
    """

    def __init__(
        self,
        clock: StepClock,
        stop: Callable[[str], None],
        limit_s: float = 30.0,
        save: Callable[[str], None] = lambda cause: None,
    ) -> None:
        self._clock = clock
        self._stop = stop
        self._save = save
        self._limit_s = limit_s
        self._stopping: CommonBoundary | None = None
        self._saving: CommonBoundary | None = None
        self._changing = threading.Lock()
        clock.at_boundary = self.arrive

    def close(self, cause: str) -> int:
        """Want a stop; returns the boundary passed last. Called by a side thread.

        The main thread counts a boundary before it looks whether a stop is wanted, and this looks at the count after
        it has wanted one: whatever the order, a boundary beyond the returned one is not passed.
        """
        # Asked again by a coordinator that was out of reach: the main thread may wait for this one already.
        self._stopping = self._stopping or CommonBoundary(cause)
        return self._clock.boundaries

    def aim(self, boundary: int) -> None:
        """Stop at this boundary."""
        if self._stopping is not None:
            self._stopping.set_target(boundary)

    def close_to_save(self, cause: str) -> int:
        """Want a save; returns the boundary passed last, as ``close`` does."""
        with self._changing:
            self._saving = CommonBoundary(cause)
        return self._clock.boundaries

    def save_at(self, boundary: int | None) -> None:
        """Save at this boundary; None: not at all."""
        if self._saving is not None:
            self._saving.set_target(boundary)

    def arrive(self, boundary: int) -> None:
        """The main thread is at a boundary; returns when it may go on."""
        saving = self._saving
        if saving is not None and self._is_past(saving, boundary):
            with self._changing:
                # It may be the next one by now.
                if self._saving is saving:
                    self._saving = None
            # Where nobody answered in time the others have saved without this rank: later would be another state.
            if saving.target == boundary:
                self._save(saving.cause)
        stopping = self._stopping
        if stopping is None or not stopping.known.wait(self._limit_s):
            # Nobody answers; whoever wanted the stop ends the process in the end.
            return
        if stopping.target is not None and boundary >= stopping.target:
            self._stop(stopping.cause)

    def _is_past(self, saving: CommonBoundary, boundary: int) -> bool:
        """Whether this boundary is the one that was waited for, or there is nothing to wait for any more."""
        if not saving.known.wait(self._limit_s):
            return True
        return saving.target is None or boundary >= saving.target
