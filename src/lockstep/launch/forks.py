"""Workers that are forks of one process (``--warm-restarts``), as the launcher sees them."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from lockstep.torch_internals import elastic
from lockstep.torch_internals.elastic import OutputFile, OwnProcesses

START_S = 60.0
"""How long the process may take to import torch and to fork."""


def can_fork(command: tuple[str, ...]) -> bool:
    """Return whether a fork can run a command: on Linux, a script or module of Python."""
    runs_python = command[0] == sys.executable and len(command) > 1
    return sys.platform == "linux" and runs_python and (command[1] == "-m" or not command[1].startswith("-"))


class ForkedWorker:
    """A fork, with the names of ``subprocess.Popen`` that torch and the launcher use."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._server.codes.get(self.pid)

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        self._server.receive(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended. Raises TimeoutExpired after ``timeout`` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired("a worker", timeout or 0.0)
            self._server.receive(0.05)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """The process that has imported torch, and its forks. It is started with the first worker, and again after it was
    ended."""

    def __init__(self, command: tuple[str, ...], say: Callable[[str], None]) -> None:
        self._command = command[1:]
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._received = b""
        self._forked: list[int] = []
        self._running: set[int] = set()
        self.codes: dict[int, int] = {}

    @property
    def pids(self) -> tuple[int, ...]:
        """The process itself, which outlives a round."""
        return () if self._process is None else (self._process.pid,)

    def processes(self, **keywords: object) -> OwnProcesses:
        """Start workers as torch's ``start_processes`` does."""
        elastic.probe()
        processes = OwnProcesses(self.fork, **keywords)
        try:
            processes.start()
        except BaseException:
            processes.close()
            raise
        return processes

    def fork(
        self,
        local: int,
        arguments: tuple[str, ...],
        environment: Mapping[str, str],
        stdout: OutputFile,
        stderr: OutputFile,
    ) -> ForkedWorker | None:
        """Return a new worker; None, and say so, if there is none within ``START_S``."""
        files = [
            os.dup(number if file is None else file.fileno()) for number, file in ((1, stdout), (2, stderr))
        ]
        request = json.dumps({"command": self._command, "environment": dict(environment)}).encode() + b"\n"
        try:
            if self._process is None or self._process.poll() is not None:
                self._start(environment)
            assert self._channel is not None
            sent = socket.send_fds(self._channel, [request], files)
            self._channel.sendall(request[sent:])
            deadline = time.monotonic() + START_S
            while not self._forked and time.monotonic() < deadline and self._channel is not None:
                self.receive(0.1)
            return ForkedWorker(self, self._forked.pop())
        except (OSError, IndexError):
            self._say("lockstep: the process of --warm-restarts did not answer; workers import torch anew.")
            self.close()
            return None
        finally:
            for file in files:
                os.close(file)

    def _start(self, environment: Mapping[str, str]) -> None:
        self.close()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lockstep.launch.fork_server", str(os.getpid()), str(theirs.fileno())],
                env=dict(environment), pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        self._channel, self._received = ours, b""

    def receive(self, limit_s: float) -> None:
        """Take in what the process says; wait for it at most ``limit_s``."""
        channel = self._channel
        while channel is not None and channel.fileno() >= 0 and select.select([channel], [], [], limit_s)[0]:
            limit_s = 0.0
            try:
                data = channel.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            *lines, self._received = (self._received + data).split(b"\n")
            for message in map(json.loads, lines):
                pid = message["pid"]
                if "code" in message:
                    self._running.discard(pid)
                    self.codes[pid] = message["code"]
                else:
                    self._running.add(pid)
                    self.codes.pop(pid, None)
                    self._forked.append(pid)

    def close(self) -> None:
        """End the process, and its forks with it."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._channel = None
        self.codes |= dict.fromkeys(self._running, -signal.SIGKILL)
        self._running.clear()
