"""Programs that start machines elsewhere (ssh, srun, mpirun): run together, their output and signals relayed."""

from __future__ import annotations

import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from lockstep.config.sources import inherited_environment
from lockstep.errors import ConfigError
from lockstep.launch.backend import Command
from lockstep.launch.console import Console
from lockstep.launch.signals import ReceivedSignals, received_by
from lockstep.runtime.failure import of_signal

# ssh's own exit code.
LOST = 255
# After a program failed, for the others to end by themselves; then from the closed input to SIGKILL.
END_WAIT_S = 20.0
KILL_WAIT_S = 3.0
NOT_FOUND = "{program} is not installed here, or not in PATH. Install it, or launch in another way."


class Programs:
    """A group of running programs.

    Args:
        grace_s: from a stop signal to the end of whatever still runs.
        least: with fewer programs than this, what is left cannot go on.
        translate: the signal that a program gets for one that this process got, if it has no input; whether that was
            not the first.
    """

    def __init__(
        self,
        programs: Sequence[Command],
        grace_s: float,
        least: int,
        translate: Callable[[signal.Signals, bool], signal.Signals] = lambda number, _again: number,
    ) -> None:
        self._programs = programs
        self._grace_s = grace_s
        self._least = least
        self._translate = translate
        self._events: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: list[threading.Thread] = []
        self._codes: list[int] = []
        self._received = ReceivedSignals()
        self._deadline: float | None = None
        self._closed = False

    def run(self) -> int:
        """Start all, wait for all, and return the exit code of the one that failed first, or 0.

        Raises:
            ConfigError: one of them is not installed.
        """
        with received_by(lambda number: self._events.put(("signal", number))):
            try:
                self._start()
                while self._running:
                    self._next_event()
            finally:
                self._kill()
        for reader in self._readers:
            reader.join(KILL_WAIT_S)
        return self._code()

    # -- starting ------------------------------------------------------------------------------------

    def _start(self) -> None:
        console = Console()
        for index, program in enumerate(self._programs):
            process = _started(program)
            self._running[index] = process
            for source, stream in ((process.stdout, "out"), (process.stderr, "err")):
                assert source is not None
                self._thread(console.relay, program.title, program.shown, source, stream, wanted=True)
            self._thread(self._await, index, process)
            if program.stdin is not None:
                self._thread(_write, process, program.stdin.encode() + b"\n")

    def _thread(self, function: Callable[..., None], *arguments: object, wanted: bool = False) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        thread.start()
        if wanted:
            self._readers.append(thread)

    def _await(self, index: int, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._events.put(("ended", index))

    # -- running -------------------------------------------------------------------------------------

    def _next_event(self) -> None:
        with suppress(queue.Empty):
            kind, value = self._events.get(timeout=0.2)
            if kind == "ended":
                self._ended(value)
            else:
                self._pass_on(signal.Signals(value))
        # First inputs are closed, which ends nodes; what then still runs is killed.
        if self._deadline is not None and time.monotonic() > self._deadline:
            if self._closed:
                self._kill()
            self._close()

    def _ended(self, index: int) -> None:
        process = self._running.pop(index)
        code = process.returncode
        self._codes.append(of_signal(-code) if code < 0 else code)
        if code and len(self._running) < self._least:
            self._end_within(END_WAIT_S)

    def _pass_on(self, number: signal.Signals) -> None:
        again = self._received.first is not None
        self._received.add(number)
        for index, process in self._running.items():
            if self._programs[index].stdin is not None:
                _write(process, number.name.encode() + b"\n")
            else:
                with suppress(OSError):
                    process.send_signal(self._translate(number, again))
        self._end_within(KILL_WAIT_S if self._received.end else self._grace_s + KILL_WAIT_S)

    def _end_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _close(self) -> None:
        """Nodes end everything when their input closes; other programs are asked."""
        self._closed = True
        self._deadline = time.monotonic() + KILL_WAIT_S
        for index, process in self._running.items():
            if self._programs[index].stdin is None:
                process.terminate()
            elif process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()

    def _kill(self) -> None:
        for process in self._running.values():
            process.kill()

    def _code(self) -> int:
        """Return that of the first failure; a connection that was lost is only its consequence, if there is another."""
        failed = [code for code in self._codes if code]
        if not failed:
            return 0
        telling = [code for code in failed if code != LOST]
        if not telling and self._received.first is not None:
            return of_signal(self._received.first)
        return (telling or failed)[0]


def _started(program: Command) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            program.arguments,
            env={**inherited_environment(), **program.environment},
            stdin=subprocess.DEVNULL if program.stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A Ctrl-C in the terminal is for us to pass on.
            start_new_session=True,
        )
    except FileNotFoundError:
        raise ConfigError(NOT_FOUND.format(program=program.arguments[0])) from None
    except OSError as error:
        raise ConfigError(
            f"{program.arguments[0]} cannot be started: {error.strerror}. Run it in a shell to see why."
        ) from None


def _write(process: subprocess.Popen[bytes], content: bytes) -> None:
    assert process.stdin is not None
    # It has ended; that is told elsewhere.
    with suppress(OSError, ValueError):
        process.stdin.write(content)
        process.stdin.flush()
