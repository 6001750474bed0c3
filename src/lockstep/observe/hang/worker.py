"""The watch inside one process of a run: tells the coordinator what the main thread gets done, answers its questions,
and closes the gate of the main thread where all ranks are to stop."""

from __future__ import annotations

import math
import os
import platform
import select
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

from lockstep.errors import ControlError
from lockstep.observe.hang.gate import StopGate
from lockstep.observe.hang.processes import machine_of_process, waited_of_main_thread_s
from lockstep.runtime import failure
from lockstep.runtime.clock import StepClock
from lockstep.runtime.failure import HANG, PREEMPTED, STOP_SIGNALS, Departures, of_signal

if TYPE_CHECKING:
    from lockstep.control.client import Client
    from lockstep.observe.hang.records import Evidence, Message

HEARTBEAT_S = 0.5


class WorkerWatch:
    """Two side threads: one sends heartbeats and looks for signals, the other listens to the coordinator.

    Args:
        rank: Of this process.
        world_size: Number of processes.
        clock: What the main thread gets done.
        stop: See ``StopGate``.
        connect: Connects to the coordinator, or raises ControlError; None for a process alone, which only looks for
            signals. Called again whenever the connection is lost.
        client: What it has returned already, if it has.
        departures: Learns which of the other ranks have ended.
        signals: Stop signals; None where they are somebody else's.
        grace_s: From a stop signal until the process ends itself, where nobody else would.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        clock: StepClock,
        stop: Callable[[str], None],
        connect: Callable[[], Client] | None,
        client: Client | None,
        departures: Departures,
        signals: StopSignals,
        grace_s: float = 30.0,
    ) -> None:
        self.gate = StopGate(clock, stop, limit_s=grace_s)
        self._rank = rank
        self._world_size = world_size
        self._clock = clock
        self._connect = connect
        self._client = client
        self._departures = departures
        self._signals = signals
        self._grace_s = grace_s
        self._asked_by: int | None = None
        self._deadline: float | None = None
        self._main_thread = threading.main_thread().ident or 0
        # A byte ends the wait of the thread that sends heartbeats.
        self._wake, self._waker = socket.socketpair()
        self._ended = False
        self._owner = os.getpid()
        self._threads = [threading.Thread(target=self._send_heartbeats, name="lockstep-watch", daemon=True)]
        if connect is not None:
            # Not when it is needed: the main thread may then stand still within an import.
            from lockstep.observe.hang.evidence import gather_evidence

            self._gather_evidence = gather_evidence

    def start(self) -> None:
        """Say who this is, and begin."""
        if self._client is not None:
            self._say_hello()
        self._threads[0].start()

    def _say_hello(self) -> None:
        self.tell(
            "hello",
            rank=self._rank,
            world_size=self._world_size,
            host=platform.node(),
            pid=os.getpid(),
            machine=machine_of_process(),
        )
        listener = threading.Thread(target=self._listen, name="lockstep-listen", daemon=True)
        listener.start()
        self._threads[1:] = [listener]

    def end(self) -> None:
        """Say good-bye and stop the threads."""
        if self._ended or os.getpid() != self._owner:
            return
        self._ended = True
        # From here on boundaries are passed without a question.
        self._clock.at_boundary = None
        if self._client is not None:
            self.tell("bye", failed=failure.has_failed(), evidence=self._evidence().to_message())
        self._waker.send(b"\0")
        if self._client is not None:
            self._client.close()
        for thread in self._threads:
            thread.join(1.0)
        self._signals.give_back()
        self._wake.close()
        self._waker.close()

    def tell(self, verb: str, **values: object) -> None:
        """Tell the coordinator, if there is one: "ending" and "done" of ``end_training``, "committed" of a checkpoint,
        "stopped" with a sentence for people; the rest is this watch's own."""
        if self._client is None:
            return
        try:
            self._client.send({"kind": f"watch.{verb}", **values})
        except ControlError:
            # The coordinator has ended, which is somebody else's matter, or it stood still for long.
            self._client = None

    def _connect_again(self) -> None:
        if self._client is None and self._connect is not None and not self._ended:
            with suppress(ControlError):
                self._client = self._connect()
                self._say_hello()
            if self._ended and self._client is not None:
                self._client.close()

    # Beating -----------------------------------------------------------------------------------------

    def _send_heartbeats(self) -> None:
        # select() takes no descriptors above 1023.
        news = select.poll()
        news.register(self._wake, select.POLLIN)
        news.register(self._signals.fileno(), select.POLLIN)
        while not self._ended:
            self._connect_again()
            clock = self._clock
            # A copy, as the main thread appends meanwhile.
            local = list(clock.local_s)
            self.tell(
                "heartbeat",
                ticks=clock.ticks,
                steps=clock.steps,
                boundaries=clock.boundaries,
                slowest_s=clock.slowest_s,
                local_s=statistics.median(local) if local else 0.0,
                own=dict(clock.own),
                part=clock.parts.part,
                waited_s=waited_of_main_thread_s(),
                latest=json_numbers(clock.latest() if clock.latest is not None else {}),
            )
            news.poll(1000 * HEARTBEAT_S)
            self._look_for_signals()

    def _look_for_signals(self) -> None:
        number = self._signals.read()
        if number is not None:
            # Who sends a second one does not want to wait for the step.
            if self._asked_by is not None:
                end_at_once(number)
            self._ask_for_stop(number)
        if self._deadline is not None and time.monotonic() > self._deadline:
            if self._clock.boundaries == 0:
                # No step was complete: there was nothing to save.
                os._exit(PREEMPTED)
            self._end_without_save(self._asked_by or signal.SIGTERM)

    def _ask_for_stop(self, number: int) -> None:
        self._asked_by = number
        self._deadline = time.monotonic() + self._grace_s
        if self._client is not None:
            name = signal.Signals(number).name
            self.tell("stop_wanted", cause=name, boundaries=self._clock.boundaries, steps=self._clock.steps)
        elif self._world_size > 1:
            # Without a coordinator the ranks cannot agree on a boundary.
            self._end_without_save(number)
        elif self._clock.steps > 0 or self._clock.boundaries > 0:
            # Alone in the run it stops at the next boundary, without asking.
            self.gate.aim(self.gate.close(signal.Signals(number).name) + 1)
        else:
            sys.stderr.write(f"lockstep: {nothing_to_save(signal.Signals(number).name)}.\n")
            os._exit(PREEMPTED)

    def _end_without_save(self, number: int) -> None:
        name = signal.Signals(number).name
        say(f"rank {self._rank} ends because of {name}, before all ranks had saved at one step boundary.")
        end_at_once(number)

    # Listening ---------------------------------------------------------------------------------------

    def _listen(self) -> None:
        # ``tell`` lets go of the client when it fails; what has come is still read.
        client = self._client
        while client is not None and not self._ended:
            try:
                message = client.receive(None)
            except ControlError:
                return
            if message is not None:
                self._obey(str(message.get("kind", "")).partition(".")[2], message)

    def _obey(self, verb: str, message: Message) -> None:
        if verb == "explain":
            question, evidence = message.get("question"), self._evidence().to_message()
            self.tell("evidence", question=question, evidence=evidence)
        elif verb == "stop":
            boundary = self.gate.close(str(message.get("cause", "a signal")))
            self.tell("passed", boundary=boundary, steps=self._clock.steps)
        elif verb == "target" and isinstance(message.get("boundary"), int):
            self.gate.aim(message["boundary"])
        elif verb == "ranks":
            self._clock.others = message
        elif verb == "news":
            self._clock.news(str(message.get("event", "")), **news_of(message))
        elif verb == "left" and isinstance(message.get("rank"), int):
            self._departures.add(message["rank"])
        elif verb == "back" and isinstance(message.get("rank"), int):
            self._departures.discard(message["rank"])
        elif verb == "stop_now":
            os._exit(PREEMPTED)
        elif verb == "end":
            if message.get("sentence"):
                self._clock.news("error", **news_of(message))
            self._clock.news("end", reason=str(message.get("reason", "hang"))[:100])
            os._exit(HANG)

    def _evidence(self) -> Evidence:
        return self._gather_evidence(
            rank=self._rank,
            host=platform.node(),
            step=self._clock.boundaries,
            idle_s=0.0,
            main_thread=self._main_thread,
        )


def json_numbers(values: Mapping[str, float]) -> dict[str, float | str]:
    """Return the same in JSON, which has no NaN and no infinity: these as words, which ``float`` reads."""
    return {name: value if math.isfinite(value) else str(value) for name, value in values.items()}


def news_of(message: Message) -> dict[str, object]:
    """Return the values of what a coordinator tells rank 0 of the run."""
    rank = message.get("rank")
    found: dict[str, object] = {"sentence": str(message.get("sentence", ""))[:1000]}
    return found | ({"rank": rank} if isinstance(rank, int) else {})


def say(sentence: str) -> None:
    """Write a line of ours on this process's console."""
    sys.stderr.write(f"lockstep: {sentence}\n")
    sys.stderr.flush()


def nothing_to_save(cause: str) -> str:
    """Return what there is to say of a stop before anything was done."""
    return f"the run ended because of {cause} before its first step; there was nothing to save"


def end_at_once(number: int) -> None:
    """End this process as the signal would have, had nobody taken it over."""
    os._exit(of_signal(number))


class StopSignals:
    """Takes over the signals of ``STOP_SIGNALS`` for which the script has no handler of its own.

    They are seen by a side thread at once even while the main thread waits in C.

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
            # Written by the C handler: the Python one runs only when the main thread comes back from C.
            self._previous_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._give_back_in_child)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Python must have a handler, so that its C handler writes to the socket."""

    def fileno(self) -> int:
        return self._receiver.fileno()

    def read(self) -> int | None:
        """Return the number of a stop signal that has arrived, or None."""
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
