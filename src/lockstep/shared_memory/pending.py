"""Calls of collectives in the order in which they were made, each carried on by whoever waits for it.

A call does as much as it can without waiting when it is made. The rest is done by the thread that waits for it, or,
where nobody may wait for long, by a thread of the group.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from lockstep.shared_memory.slots import CollectiveSteps, Waitable
from lockstep.shared_memory.tensors import CallTensors
from lockstep.torch_internals.dispatch import unseen_by_modes


def deadline_of(timeout: timedelta | None) -> float:
    """Return the deadline by the monotonic clock; 0.0: none."""
    return time.monotonic() + timeout.total_seconds() if timeout else 0.0


class PendingCall(dist.Work):
    """One call of a collective; torch's handle for it.

    Args:
        rows: What it does, and waits for, one row of steps after the other.
        result: What its future holds: the tensors that it writes.
        staging: The memory of its tensors.
    """

    def __init__(
        self,
        queue: CallQueue,
        rows: Iterable[CollectiveSteps],
        result: object,
        staging: CallTensors | None,
        source: int = -1,
    ) -> None:
        super().__init__()
        self.queue, self.value, self.staging, self.source = queue, result, staging, source
        self.steps: CollectiveSteps = chain.from_iterable(rows)
        self.awaits: Waitable | None = None
        self.done = False
        self.error: BaseException | None = None
        self._futures: list[torch.futures.Future[None]] = []

    def advance(self) -> bool:
        """Go on until something is awaited that is not there yet; whether the call is done."""
        try:
            while True:
                self.awaits = next(self.steps)
                if not self.awaits.is_there():
                    return False
        except StopIteration:
            self.end()
        except BaseException as error:
            self.end(error)
        return True

    def run(self, deadline: float) -> None:
        """Go on until the end, waiting."""
        try:
            while True:
                if self.awaits is not None:
                    self.awaits.wait(deadline)
                self.awaits = next(self.steps)
        except StopIteration:
            self.end()
        except BaseException as error:
            self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """Mark the call as done, or failed."""
        try:
            if error is None and self.staging is not None:
                self.staging.finish()
        except BaseException as raised:
            error = raised
        # Steps and staging keep tensors alive, and a handle may be kept for long.
        self.error, self.steps, self.awaits, self.staging = error, iter(()), None, None
        # Last: other threads look at it without the lock, and then at the error.
        self.done = True

    def announce(self) -> None:
        """Let those know who wait for the future. Not under a lock: they may call collectives."""
        with self.queue.lock:
            futures, self._futures = self._futures, []
        if futures:
            with self.queue.another_worker():
                for future in futures:
                    future.set_result(None)

    def _value(self, _: object) -> object:
        if self.error is not None:
            raise self.error
        return self.value

    # torch's names ------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Go on with the calls before it and with it, and return when it is done.

        Raises:
            RuntimeError: a rank has ended, or time is up.
            CollectiveMismatchError: the ranks called different collectives.
        """
        if not self.done:
            self.queue.finish(self, deadline_of(timeout))
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        if not self.done:
            # Who only polls does not carry the call on, so that a thread of the queue has to.
            self.queue.hand_over()
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> Any:
        return self.value

    def source_rank(self) -> int:
        return self.source

    # ``dist.recv`` without a source calls it by this name.
    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[object]:
        ended: torch.futures.Future[None] = torch.futures.Future()
        # Not by set_exception, which DDP's reducer takes for a value. What a callback raises is an error in C++, too.
        future = ended.then(self._value)
        # ``announce`` takes the list under this lock after ``done`` is set: a future is in it, or set here.
        with self.queue.lock:
            is_pending = not self.done
            if is_pending:
                self._futures.append(ended)
        if is_pending:
            self.queue.hand_over()
        else:
            ended.set_result(None)
        return future


class CallQueue:
    """Calls that use one thing (the slots of a group, a channel) one after the other.

    After a call that failed nobody knows where the other ranks are: all later ones fail with its error.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        # A call has ended, and nobody carries one on.
        self._changed = threading.Condition(self.lock)
        self._is_carried_on = False
        self._calls: deque[PendingCall] = deque()
        self._handed = threading.Semaphore(0)
        # The threads of this queue that run nobody's callback.
        self._workers: set[int] = set()
        self._closed = False
        self._error: BaseException | None = None

    def submit(self, call: PendingCall, now: bool, is_needed: bool) -> PendingCall:
        """Take a call. ``now``: return when it is done. ``is_needed``: others need this rank to go on with it."""
        with self.lock:
            first = not self._calls
            self._calls.append(call)
            # Nobody else has a turn.
            if first:
                # Under the lock, so that no other thread carries it on at the same time. It never waits.
                self._begin(call)
        if call.done:
            call.announce()
            if now:
                call.wait()
        elif now:
            self.finish(call)
            call.wait()
        elif is_needed or not first:
            self.hand_over()
        return call

    def _begin(self, call: PendingCall) -> None:
        if self._error is not None:
            call.end(self._error)
        with unseen_by_modes():
            if call.done or call.advance():
                self._error = call.error
                self._calls.popleft()

    def finish(self, call: PendingCall, deadline: float = 0.0) -> None:
        """Carry on the calls up to this one, or wait for who does.

        Raises:
            RuntimeError: another thread still carries on an earlier call at the deadline.
        """
        while not call.done:
            with self._changed:
                # Not for the thread that carries on calls alone: after this one it may go on with a later one.
                limit_s = max(0.0, deadline - time.monotonic()) if deadline else None
                if not self._changed.wait_for(lambda: call.done or not self._is_carried_on, limit_s):
                    raise RuntimeError(f"Timed out: an earlier call of {self.name} is not done yet.")
                if call.done:
                    return
                self._is_carried_on = True
                head = self._calls[0]
            # An error of an earlier call also ends this one, without a step.
            if self._error is not None:
                head.end(self._error)
            else:
                with unseen_by_modes():
                    head.run(deadline)
            with self._changed:
                self._error = head.error
                self._calls.popleft()
                self._is_carried_on = False
                self._changed.notify_all()
            head.announce()

    def hand_over(self) -> None:
        """Let a thread of this queue carry on the calls that are there."""
        with self.lock:
            if not self._workers:
                self._start_worker()
        self._handed.release()

    @contextmanager
    def another_worker(self) -> Iterator[None]:
        """Surround callbacks: they may wait for a later call, which another thread than theirs has to carry on."""
        me = threading.get_ident()
        with self.lock:
            is_worker = me in self._workers
            if is_worker:
                self._workers.remove(me)
                if not self._workers:
                    self._start_worker()
        try:
            yield
        finally:
            with self.lock:
                if is_worker:
                    self._workers.add(me)

    def _start_worker(self) -> None:
        worker = threading.Thread(target=self._work, name=self.name, daemon=True)
        worker.start()
        assert worker.ident is not None
        self._workers.add(worker.ident)

    def close(self) -> None:
        """End its threads."""
        self._closed = True
        self._handed.release()

    def _work(self) -> None:
        while True:
            self._handed.acquire()
            if self._closed:
                # For the next of them.
                self._handed.release()
                return
            self._finish_all()

    def _finish_all(self) -> None:
        with self.lock:
            last = self._calls[-1] if self._calls else None
        if last is not None:
            self.finish(last)
