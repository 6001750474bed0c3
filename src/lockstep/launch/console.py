"""What a launch writes, for every way of launching: its own lines, the output of programs, names of log files."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from lockstep.errors import ConfigError

SAME_S = 30.0
LAUNCHER_LINE = b"lockstep: "
FAILED = re.compile(rb"lockstep: rank \d+\b(?=.* failed)")


def say(text: str) -> None:
    """Complete lines of the launcher's own, after all that was printed before."""
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def make_log_folder(path: str | None) -> None:
    """Make the folder of ``--log-dir``, if there is one; raises ConfigError."""
    if path is None:
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--log-dir {path}: cannot be made: {reason}. Name another directory.") from None


def rank_log(folder: str | Path, rank: int | str, stream: str, restart: int = 0) -> str:
    """Return the file for a rank's ``out`` or ``err``. What was written before a restart stays."""
    suffix = f".restart-{restart}" if restart else ""
    return os.path.join(folder, f"rank-{rank}{suffix}.{stream}")


class Console:
    """Shows what programs write as ``out`` or ``err``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed_lines: dict[bytes, tuple[str, float]] = {}

    def relay(self, title: str, shown: Callable[[bytes], bytes], source: IO[bytes], stream: str) -> None:
        """Show whole lines of a program until ``source`` ends. What several launchers say of one event, once."""
        for line in source:
            text = shown(line if line.endswith(b"\n") else line + b"\n")
            if not self._repeats(title, text, time.monotonic()):
                self._show(stream, text)

    def _show(self, stream: str, content: bytes) -> None:
        target = sys.stdout if stream == "out" else sys.stderr
        # Nobody reads any more.
        with self._lock, suppress(OSError, ValueError):
            target.flush()
            target.buffer.write(content)
            target.flush()

    def _repeats(self, title: str, text: bytes, now: float) -> bool:
        # The launcher's own lines begin with this word, perhaps behind the name of a host.
        start = text.find(LAUNCHER_LINE)
        if not 0 <= start <= 80:
            return False
        where = text[:start].decode("utf-8", "replace") or title
        # Machines say it in different words.
        failed = FAILED.match(text, start)
        with self._lock:
            first, when = self._failed_lines.setdefault(
                failed.group() if failed else text[start:], (where, now)
            )
        return first != where and now - when < SAME_S
