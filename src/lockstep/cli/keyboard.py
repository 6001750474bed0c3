"""Single keys of a terminal, without Enter."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from types import TracebackType


class Keyboard:
    """Reads keys as they are pressed, inside of a ``with``; none where standard input is no terminal.

    Ctrl-C interrupts as ever.
    """

    def __init__(self) -> None:
        self._descriptor = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[object] | None = None

    def __enter__(self) -> Keyboard:
        if self._descriptor is not None:
            self._before = termios.tcgetattr(self._descriptor)
            tty.setcbreak(self._descriptor)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None and self._before is not None:
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def pressed(self, timeout_s: float) -> str:
        """The next key within so many seconds; "": none."""
        if self._descriptor is None:
            select.select([], [], [], timeout_s)
            return ""
        ready, _, _ = select.select([self._descriptor], [], [], timeout_s)
        if not ready:
            return ""
        key = os.read(self._descriptor, 1)
        if not key:  # the terminal is gone
            self._descriptor = None
        return key.decode("ascii", "replace")
