"""A thread that works for an object for as long as somebody else has it."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol


class Worker(Protocol):
    def work(self) -> None:
        """Do what there is to do, until there is nothing or ``ended`` of the thread is set. Must not raise."""


class LoaderThread:
    """Calls ``work`` of ``worker`` in a daemon thread, soon after each ``wake``.

    The thread ends with ``end`` or with the worker, of which it has no reference while it waits.

    ``changed``: the condition with which it waits; the worker may guard its state with it.
    """

    def __init__(self, worker: Worker, name: str) -> None:
        self.changed = threading.Condition()
        self.ended = False
        self._awake = False  # there may be work, or it is being done
        self._called = False
        weakref.finalize(worker, self.end)
        self.thread = threading.Thread(target=_run, args=(self, weakref.ref(worker)), name=name, daemon=True)
        self.thread.start()

    def wake(self) -> None:
        """There may be something to do."""
        with self.changed:
            self._awake = self._called = True
            self.changed.notify_all()

    def wait_until_idle(self) -> None:
        """Wait until what there was to do has been done."""
        with self.changed:
            self.changed.wait_for(lambda: not self._awake or not self.thread.is_alive())

    def end(self) -> None:
        """Have the thread end after what it is doing."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def join(self) -> None:
        """Wait until the thread has ended."""
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def wait_for_call(self) -> bool:
        """Wait for the next ``wake``; False: the thread shall end."""
        with self.changed:
            if not self._called:
                self._awake = False
                self.changed.notify_all()
            self.changed.wait_for(lambda: self._called or self.ended)
            self._called = False
            return not self.ended


def _run(background: LoaderThread, reference: weakref.ref[Worker]) -> None:
    try:
        while background.wait_for_call():
            worker = reference()
            if worker is None:
                return
            worker.work()
            del worker  # it may go while this thread waits
    finally:
        background.end()  # nobody shall wait for it
