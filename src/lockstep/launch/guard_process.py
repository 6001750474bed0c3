"""The launcher's side of the guard."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress

from lockstep.config.sources import export_environment
from lockstep.launch import bare
from lockstep.runtime.memory_folder import MemoryFolder

WAIT_S = 2.0


def run_guarded(run: Callable[[GuardProcess, str], int]) -> int:
    """Return what ``run`` returns. Unless that is 0, all that it started is ended, as at any end of this process.

    Args:
        run: Gets the guard, and a folder for the launch's secret and reports. It is removed at the end, too.
    """
    with ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="lockstep-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        # What is started from here on inherits the variables.
        export_environment({bare.MEMORY_VARIABLE: _memory_folder(stack), bare.FOLDER_VARIABLE: folder})
        guard_process = GuardProcess()
        stack.callback(guard_process.close)
        export_environment({bare.ID_VARIABLE: guard_process.launch_id})
        code = run(guard_process, folder)
        if code == 0:
            guard_process.finished()
        return code


def _memory_folder(stack: ExitStack) -> str:
    """Return where workers may keep checkpoints in memory, until the launch is over; nowhere on a system that has no
    place."""
    try:
        folder = MemoryFolder()
    except OSError:
        return ""
    stack.callback(folder.close)
    return folder.path


class GuardProcess:
    """A process that ends all workers of a launch when this one is gone, unless it was told ``finished``."""

    def __init__(self) -> None:
        self.launch_id = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(bare.__file__), "--guard", self.launch_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A Ctrl-C in the terminal is not for it.
            start_new_session=True,
        )

    def finished(self) -> None:
        """There is nothing to end."""
        assert self._process.stdin is not None
        # It was killed: there is nobody to tell.
        with suppress(OSError):
            self._process.stdin.write(bare.DONE)

    def close(self) -> None:
        """Close the guard's pipe, which it takes for the end of this process."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(WAIT_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
