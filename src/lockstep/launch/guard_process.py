"""The launcher's side of the guard: starts it, and starts it again if somebody killed or stopped it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from types import TracebackType

from lockstep.launch import guard

WAIT_S = 2.0
SILENT_S = 3.0
FIRST_WORD_S = 20.0  # on a machine that is busy, an interpreter takes its time to start


class GuardProcess:
    """A process that ends all workers of a launch when this one is gone, unless it was told ``finished``."""

    def __init__(self, launch_id: str) -> None:
        self._launch_id = launch_id
        self._process = self._started()

    @property
    def pid(self) -> int:
        return self._process.pid

    def renew(self) -> None:
        """Start another one if it was killed or is stopped. Called a few times a second; costs some microseconds."""
        now = time.monotonic()
        if self._has_beaten():
            self._silent_after = now + SILENT_S
        if now > self._silent_after:
            self._process.kill()  # before its pipe is closed, which it would take for this process's end
            self._process.wait(WAIT_S)
        if self._process.poll() is not None:
            self._close()
            self._process = self._started()

    def finished(self) -> None:
        """There is nothing to end."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it was killed; nobody to tell
            self._process.stdin.write(guard.DONE)

    def __enter__(self) -> GuardProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _has_beaten(self) -> bool:
        assert self._process.stdout is not None
        try:
            return bool(os.read(self._process.stdout.fileno(), 4096))
        except OSError:  # nothing there
            return False

    def _started(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(guard.__file__), self._launch_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is not for it
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._silent_after = time.monotonic() + FIRST_WORD_S
        return process

    def _close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdout.close()
            self._process.stdin.close()
            self._process.wait(WAIT_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
