"""The line of progress below the output of a launch: step, loss, throughput, time that is left.

Workers write to the terminal themselves, and nothing of theirs passes through here. So the line has the last row of the
terminal for itself: the rows above it scroll without it, as with apt's bar. Whatever the workers print, partial lines
too, neither damages the line nor is damaged by it.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Callable, Mapping

from lockstep.words import digits, duration, percent, plain_text, short, whole

EVERY_S = 0.5
LEAST_ROWS, LEAST_COLUMNS = 5, 20
MOST_ROWS = 10_000
STDOUT, STDERR = 1, 2

Numbers = Mapping[str, float | str]
"""By the names of ``observe.measures.latest``; what is no finite number is a word that ``float`` reads."""


def progress_line(numbers: Numbers, elapsed_s: float) -> str:
    """Return the line of progress: "step 120/1,000 loss 2.31 1.2M tokens/s MFU 41 % 3 min 20 s, 22 min left"; "" before
    the first step.

    Where the script has not said how many steps there are, it is what is left of the epoch.
    """
    values = {name: float(value) for name, value in numbers.items()}

    def known(name: str) -> float:
        value = values.get(name, math.nan)
        return value if math.isfinite(value) else math.nan

    step, total = known("step"), known("total_steps")
    if math.isnan(step):
        return ""
    words = [f"step {whole(step)}" if math.isnan(total) else f"step {whole(step)}/{whole(total)}"]
    if "loss" in values:
        words.append(f"loss {digits(values['loss'], 4)}")
    rates = [(known(f"{unit}_per_second"), unit) for unit in ("tokens", "samples")]
    words += [f"{short(rate)} {unit}/s" for rate, unit in rates if rate > 0][:1]
    if known("mfu") > 0:
        words.append(f"MFU {percent(known('mfu'))}")
    return "  ".join([*words, _times(known, elapsed_s)])


def _times(known: Callable[[str], float], elapsed_s: float) -> str:
    of_all = (known("total_steps") - known("step")) * known("step_seconds")
    of_epoch = known("epoch_steps_left") * known("step_seconds")
    text = duration(elapsed_s)
    if of_all >= 0:
        return f"{text}, {duration(of_all)} left"
    if of_epoch >= 0 and known("epoch") >= 0:
        return f"{text}, {duration(of_epoch)} left of epoch {whole(known('epoch'))}"
    return text


class StatusRow:
    """The last row of a terminal, kept for one line while others write above it.

    It is taken with the first ``show`` and given back by ``clear``. Nothing is written while this process is in the
    background, or while the terminal takes nothing, as after Ctrl-S.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size: os.terminal_size | None = None

    def show(self, text: str) -> None:
        """Put this into the row, as far as it fits."""
        size = self._size_now()
        if size is None or not self._may_write():
            return
        taken = b""
        if self._size is None or size != self._size:
            # ESC D, ESC [1A: a line down and up again in the same column, so that the cursor is not in the last row.
            # ESC 7, ESC [1;Nr, ESC 8: only rows 1 to N scroll; setting that moves the cursor, which is put back.
            taken = b"\x1bD\x1b[1A\x1b7\x1b[1;%dr\x1b8" % (size.lines - 1)
            self._size = size
        line = plain_text(text, size.columns - 1).encode("utf-8", "replace")
        self._write(taken + b"\x1b7\x1b[%d;1H\x1b[0m\x1b[2K%b\x1b8" % (size.lines, line))

    def clear(self) -> None:
        """Give the row back to those who write above it."""
        if self._size is not None:
            # ESC [r: the whole screen scrolls again.
            self._write(b"\x1b7\x1b[r\x1b[%d;1H\x1b[2K\x1b8" % self._size.lines)
            self._size = None

    def _size_now(self) -> os.terminal_size | None:
        """Return the terminal's size; None: too small, or not known."""
        try:
            size = os.get_terminal_size(self._descriptor)
        except OSError:
            return None
        is_enough = LEAST_ROWS <= size.lines < MOST_ROWS and size.columns >= LEAST_COLUMNS
        return size if is_enough else None

    def _may_write(self) -> bool:
        try:
            if os.tcgetpgrp(self._descriptor) != os.getpgrp():
                return False
        except OSError:
            # It is not the terminal that controls this process, so there is no background.
            pass
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(0))

    def _write(self, data: bytes) -> None:
        """Write at once, so that what others write stands before it or behind it."""
        try:
            os.write(self._descriptor, data)
        except OSError:
            # The terminal is gone.
            self._size = None


class LaunchProgress:
    """Shows the line while a launch runs.

    Args:
        numbers: Gives the newest.
        row: Where it is shown.
        now: Seconds.
    """

    def __init__(
        self, numbers: Callable[[], Numbers], row: StatusRow, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._numbers = numbers
        self._row = row
        self._now = now
        self._began = now()
        self._next = 0.0

    def update(self) -> None:
        """Show what is new, if it is time for that. Called a few times a second."""
        now = self._now()
        if now < self._next:
            return
        self._next = now + EVERY_S
        if line := progress_line(self._numbers(), now - self._began):
            self._row.show(line)

    def close(self) -> None:
        """Take the line away."""
        self._row.clear()


def wants_line(quiet: bool, terminal: str) -> bool:
    """Return whether a launch shows one: its output is a terminal that moves its cursor, and nobody asked for quiet.

    ``terminal``: the value of TERM.
    """
    return not quiet and terminal not in ("", "dumb") and os.isatty(STDOUT) and os.isatty(STDERR)
