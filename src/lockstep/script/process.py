"""One run of a script in processes of its own: started, waited for, ended; its output goes to a file."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.config.sources import inherited_environment

OF_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables that would make a process one of several."""
LAST_LINES = 12
OWN_ERROR = re.compile(r"^\W*(?:\[rank\d+\]:)?\s*lockstep\.errors\.\w+: (.+)$", re.MULTILINE)
GRACE_S = 10.0
OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "out of memory",
    "can't allocate memory",
    "MemoryError",
    "DefaultCPUAllocator",
)


class ScriptProcess:
    """Processes that run ``python -m ...``.

    Args:
        words: What follows ``python``.
        log: A file for what they print.
        environment: Variables beside those of this process.
        timeout_s: After which ``wait`` ends them.
    """

    def __init__(
        self, words: Sequence[str], log: Path, environment: Mapping[str, str], timeout_s: float
    ) -> None:
        self._log = log
        environ = {name: value for name, value in inherited_environment().items() if name not in OF_LAUNCHERS}
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environ | dict(environment),
                # A group of its own, which end() kills with all that a launcher has started.
                start_new_session=True,
            )
        self._end_at = time.monotonic() + timeout_s

    @staticmethod
    def launched(module: str, arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
        """Return the words for a module that `lockstep launch` is to start, with ``flags`` of that command."""
        return ["-m", "lockstep.cli.main", "launch", *flags, "-m", module, *arguments]

    def wait(self) -> int | None:
        """Wait, and return the exit code; None: they took too long, and were ended."""
        try:
            return self._process.wait(max(self._end_at - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self.end()
            return None

    def end(self) -> None:
        """End them, if they still run."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)

    def output(self) -> str:
        """Return what they have printed."""
        return self._log.read_text("utf-8", "replace")

    def tail(self) -> str:
        """Return the last lines of that, for a message; empty where there are none."""
        lines = self.output().rstrip().splitlines()[-LAST_LINES:]
        return "\n  ".join(["\nIts last lines:", *lines]) if lines else ""

    def ran_out_of_memory(self, code: int) -> bool:
        """Return whether what they have printed, or their exit ``code``, says that memory ran out."""
        text = self.output()
        # Signal 9, as the kernel kills where memory runs out; 137 is how a shell tells of it.
        return code in (-9, 137) or any(sign in text for sign in OUT_OF_MEMORY)

    def how_it_failed(self, code: int) -> str:
        """Return a short sentence: what this library said, or else the exit ``code``."""
        errors = OWN_ERROR.findall(self.output())
        return errors[-1] if errors else f"exit code {code}." if code >= 0 else f"signal {-code}."
