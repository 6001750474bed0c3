"""Signals that ask a run to stop, seen by a side thread at once even while the main thread waits in C."""

from __future__ import annotations

import os
import signal
import socket
import threading
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StopSignals:
    """Takes over the signals of ``STOP_SIGNALS`` for which the script has no handler of its own.

    ``fileno()`` becomes readable when one arrives; ``read()`` says which. Processes that are forked, such as workers
    of data loaders, get the default actions back. Only the main thread can make one; elsewhere it takes over nothing.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._taken: list[int] = []
        self._owner = os.getpid()
        self._previous_fd = -1
        if threading.current_thread() is not threading.main_thread():
            return
        self._taken = [number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
        for number in self._taken:
            signal.signal(number, self._handle)
        if self._taken:
            # written by the C handler: the Python one runs only when the main thread comes back from C
            self._previous_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._give_back_in_child)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Python must have a handler, so that its C handler writes to the socket."""

    def fileno(self) -> int:
        return self._receiver.fileno()

    def read(self) -> int | None:
        """The number of a stop signal that has arrived, or None."""
        try:
            received = self._receiver.recv(64)
        except (BlockingIOError, OSError):
            return None
        return next((number for number in received if number in self._taken), None)

    def give_back(self) -> None:
        """Restore the default actions. Called by the main thread."""
        if self._taken and threading.current_thread() is threading.main_thread():
            self._restore()
        self._taken = []
        self._receiver.close()
        self._sender.close()

    def _restore(self) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        for number in self._taken:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL)

    def _give_back_in_child(self) -> None:
        # The descriptors are this process's own copies: closing them does not concern the parent.
        if self._taken and os.getpid() != self._owner:
            self._restore()
            self._taken = []
            self._receiver.close()
            self._sender.close()
