"""Signals to the launcher: a first polite one asks for a stop, everything else ends the run."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

POLITE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
AT_ONCE = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class RayStopSignals:
    """While it is entered: ``stop`` is the signal that asked for a stop, ``end`` the one that ends the run."""

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None
        self.end: signal.Signals | None = None
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> RayStopSignals:
        self._before = {number: signal.signal(number, self._received) for number in (*POLITE, *AT_ONCE)}
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def limit(self, grace_s: float) -> None:
        """End the run when a stop has taken longer than the grace period."""
        if self.stop is not None and self.end is None and time.monotonic() - self._asked_at > grace_s:
            self.end = self.stop

    def _received(self, number: int, _frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if received in POLITE and self.stop is None:
            self.stop, self._asked_at = received, time.monotonic()
        elif self.end is None:
            self.end = received
