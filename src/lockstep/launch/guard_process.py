"""The launcher's side of the guard: starts it, and starts it again if somebody killed it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from types import TracebackType

from lockstep.launch import guard

WAIT_S = 2.0


class GuardProcess:
    """A process that ends all workers of a launch when this one is gone, unless it was told ``finished``."""

    def __init__(self, launch_id: str) -> None:
        self._launch_id = launch_id
        self._process = self._started()

    @property
    def pid(self) -> int:
        return self._process.pid

    def renew(self) -> None:
        """Start another one if it was killed. Called a few times a second; costs some microseconds."""
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

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(guard.__file__), self._launch_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is not for it
        )

    def _close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(WAIT_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
