"""Programs in a terminal of their own, and what a person sees of what they write there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping

from tests.launch.helpers import START_LIMIT_S, environment, wait_until

SEQUENCE = re.compile(r"\x1b(?:([D78])|\[([0-9;]*)([A-Za-z]))")


class Screen:
    """Rows and columns as DEC's VT100 has them, with the few control sequences that a line of progress needs: a
    scrolling region, a cursor that is kept and brought back."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.lines = [[" "] * columns for _ in range(rows)]
        self.gone: list[str] = []
        self.row = self.column = 0
        self.kept = (0, 0)
        self.bottom = rows - 1

    def feed(self, text: str) -> None:
        place = 0
        while place < len(text):
            found = SEQUENCE.match(text, place)
            if found is not None:
                self._obey(found)
                place = found.end()
                continue
            assert text[place] != "\x1b", f"not known here: {text[place : place + 12]!r}"
            self._put(text[place])
            place += 1

    def shown(self) -> list[str]:
        return ["".join(line).rstrip() for line in self.lines]

    def written(self) -> list[str]:
        """All lines, those too that have scrolled away."""
        return self.gone + self.shown()

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self._down()
        elif self.column < self.columns:
            self.lines[self.row][self.column] = character
            self.column += 1

    def _down(self) -> None:
        if self.row == self.bottom:
            self.gone.append("".join(self.lines.pop(0)).rstrip())
            self.lines.insert(self.bottom, [" "] * self.columns)
        elif self.row < self.rows - 1:
            self.row += 1

    def _obey(self, found: re.Match[str]) -> None:
        short, values, final = found.groups()
        numbers = [int(value) for value in (values or "").split(";") if value]
        if short == "D":
            self._down()
        elif short == "7":
            self.kept = self.row, self.column
        elif short == "8":
            self.row, self.column = self.kept
        elif final == "A":
            self.row -= numbers[0]
        elif final == "H":
            self.row, self.column = numbers[0] - 1, numbers[1] - 1
        elif final == "r":
            self.bottom = numbers[1] - 1 if numbers else self.rows - 1
            self.row = self.column = 0
        elif (final, numbers) == ("K", [2]):
            self.lines[self.row] = [" "] * self.columns
        else:
            assert final == "m", f"not known here: {found.group()!r}"


def set_size(terminal: int, rows: int, columns: int) -> None:
    """Of a terminal's descriptor."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))


class InTerminal:
    """A command in a terminal of its own, and all that it has written there.

    Args:
        size: Rows and columns.
        variables: Of its environment.
    """

    def __init__(self, *command: object, size: tuple[int, int], variables: Mapping[str, str] = {}) -> None:
        self.main, other = pty.openpty()
        set_size(other, *size)
        self.process = subprocess.Popen(
            [*map(str, command)],
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment(TERM="xterm", OMP_NUM_THREADS="1", **variables),
            # Whoever runs the tests in the background of a shell has interrupts ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(other)
        self.text = ""

    def press(self, key: str) -> None:
        os.write(self.main, key.encode())

    def read_until(self, condition: Callable[[str], bool]) -> None:
        def has_come() -> bool:
            while select.select([self.main], [], [], 0)[0]:
                try:
                    self.text += os.read(self.main, 65536).decode("utf-8", "replace")
                except OSError:  # all have closed it
                    break
            return condition(self.text) or self.process.poll() is not None

        wait_until(has_come, START_LIMIT_S)
        assert condition(self.text), self.text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.main)
