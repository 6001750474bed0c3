"""The signals of a launcher: which ask the run to stop at a step boundary, and which end it at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from lockstep.runtime.failure import PREEMPTED, STOP_SIGNALS, of_signal

# Those of STOP_SIGNALS ask the run to stop at a step boundary, the second one at once; the others at once.
END_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def received_by(receive: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Call ``receive`` with each of both kinds of signals that this process gets inside of the block; it must not
    raise."""
    before = {
        number: signal.signal(number, lambda got, _frame: receive(signal.Signals(got)))
        for number in (*STOP_SIGNALS, *END_SIGNALS)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class ReceivedSignals:
    """What the signals that a launch got ask of it, in every way of launching.

    Attributes:
        first: the first one.
        stop: the first that asks the run to stop at a step boundary.
        end: the first other one, also if it asks for a stop again: it ends the run at once.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.stop: signal.Signals | None = None
        self.end: signal.Signals | None = None

    def add(self, number: signal.Signals) -> None:
        """Count one more signal."""
        self.first = self.first or number
        if number in STOP_SIGNALS and self.stop is None:
            self.stop = number
        else:
            self.end = self.end or number


class Interrupted(Exception):
    """A signal that ends the launch at once.

    ``code``: the launch's exit code. A first stop signal before there are workers stops a run that has nothing to save.
    """

    def __init__(self, number: int, code: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)
        self.code = code


class Signals:
    """The launcher's signals: the first that asks for a stop is kept, whatever ends at once is raised.

    ``is_watched``: somebody knows how far the workers are, so that they can stop at a boundary.
    """

    def __init__(self, is_watched: bool) -> None:
        self._is_watched = is_watched
        self._received = ReceivedSignals()
        self._was_returned = False
        self._defers = False
        self.boundary = False
        """Whether there are workers that could stop at a boundary."""

    def install(self) -> None:
        """Take over; called again after anything that may have taken over itself."""
        for number in (*STOP_SIGNALS, *END_SIGNALS):
            signal.signal(number, self._handle)

    def defer(self) -> None:
        """Keep a first stop signal until ``release``: importing is no place for an exception."""
        self._defers = True

    def release(self) -> None:
        """Raise what was deferred."""
        self._defers = False
        if self._received.stop is not None and not self.boundary:
            raise Interrupted(self._received.stop, self._code(self._received.stop))

    def ignore(self) -> None:
        """Ignore signals from here on: the launch is ending already."""
        for number in (*STOP_SIGNALS, *END_SIGNALS):
            signal.signal(number, signal.SIG_IGN)

    def asked(self) -> signal.Signals | None:
        """Return the signal that asked for a stop, said once."""
        if self._was_returned or self._received.stop is None:
            return None
        self._was_returned = True
        return self._received.stop

    def _code(self, number: int) -> int:
        return PREEMPTED if self._is_watched and number in STOP_SIGNALS else of_signal(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received.add(signal.Signals(number))
        if self._received.end is not None:
            raise Interrupted(number, of_signal(number))
        if not (self.boundary or self._defers):
            raise Interrupted(number, self._code(number))
