"""Times, sizes, rates, lists and texts as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

_UNITS = ((60, "min", 1, "s", 60), (3600, "h", 60, "min", 24), (86400, "d", 3600, "h", math.inf))
"""Seconds, name, and those of the smaller unit that is said with it; from how many on the next one is taken."""
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
BINARY_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def duration(seconds: float) -> str:
    """Write seconds for people: 412 ms; 4.2 s; 3 min 20 s; 2 h 5 min; 6 d 4 h."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if round(seconds) >= 60:
        for unit, name, below, smaller, most in _UNITS:
            whole, rest = divmod(round(seconds / below), unit // below)
            if whole < most:
                return f"{whole} {name} {rest} {smaller}" if rest else f"{whole} {name}"
    if seconds >= 1:
        return f"{digits(seconds)} s"
    if seconds >= 1e-3:
        return f"{digits(seconds * 1e3)} ms"
    return f"{digits(seconds * 1e6)} µs" if seconds else "0 s"


def bytes_text(count: float) -> str:
    """Write bytes for people: 512 B; 1.25 GB, of 10^9 bytes."""
    for unit, name in _BYTES:
        if abs(count) >= unit:
            return f"{digits(count / unit)} {name}"
    return f"{digits(count)} B"


def memory_text(count: int) -> str:
    """Write memory for people: 512 B; 1.25 GiB, of 2^30 bytes; 0."""
    unit, name = next((one for one in BINARY_UNITS if count >= one[0]), BINARY_UNITS[-1])
    if unit == 1:
        return f"{count} B" if count else "0"
    return f"{three_digits(count / unit)} {name}"


def three_digits(number: float) -> str:
    """Write a number with three digits: 0, 1.25, 12.5, 1,250."""
    if number == 0:
        return "0"
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def short(number: float) -> str:
    """Write a number shortly: 12.3k, 4.5M, 1.2B; small numbers as they are."""
    for unit, name in _PREFIXES:
        if abs(number) >= unit * (10 if unit == 1e3 else 1):
            return f"{digits(number / unit)}{name}"
    return whole(number) if float(number).is_integer() else digits(number)


def whole(number: float) -> str:
    """Write a whole number: 1,234."""
    return f"{round(number):,}" if math.isfinite(number) else "?"


def digits(number: float, significant: int = 3) -> str:
    """Return a number with so many significant digits: 2.31, 0.0003, 3e-7, 1,250."""
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "infinity" if number > 0 else "-infinity"
    if number == 0:
        return "0"
    size = math.floor(math.log10(abs(number)))
    if -5 < size < 7:
        text = f"{round(number, significant - 1 - size):,.{max(significant - 1 - size, 0)}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, _, exponent = f"{number:.{significant - 1}e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}"


def percent(share: float) -> str:
    """Write a share: 43%; 4.3%; 0.04%."""
    return f"{digits(share * 100, 2 if abs(share) < 0.995 else 3)}%" if math.isfinite(share) else "?"


def date(seconds: float) -> str:
    """Return a time since 1970 in UTC, to the minute."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "?"


def count(number: int, noun: str, plural: str = "") -> str:
    """Write a number of things: 1 tensor; 1,234 tensors."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(words: Sequence[str], last: str = "and") -> str:
    """Join words as in "a, b and c"."""
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else "".join(words)


def of_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in a sentence: "rank 2", "ranks 2 and 3", "ranks 0 to 5"."""
    ordered = sorted(set(ranks))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    return f"ranks {indices(ordered)}"


def indices(numbers: Sequence[int]) -> str:
    """Write indices for people: 2 and 3; 0 to 5; 0 to 3 and 7."""
    runs = runs_of(numbers, " to ")
    if len(runs) > 8:
        runs = [*runs[:7], f"{len(runs) - 7} more"]
    return listed(runs)


def runs_of(numbers: Iterable[int], to: str) -> list[str]:
    """Return numbers in order; more than two that follow one another as the first and the last, with ``to`` between."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts: list[str] = []
    for run in runs:
        texts += [f"{run[0]}{to}{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    return texts


def two_digits(number: float) -> str:
    """Return a distance with two digits: 3e-7, 0.21, 12."""
    if not math.isfinite(number):
        return "infinite"
    if number == 0:
        return "0"
    return f"{number:.2g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def seven_digits(number: float) -> str:
    """Return a number of the run with the digits in which two may differ."""
    return f"{number:.7g}"


def escape(text: str) -> str:
    """Replace control characters, which a hostile file could send to the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def escaped_lines(text: str) -> str:
    """Escape each line."""
    return "\n".join(escape(line) for line in text.split("\n"))


LONGEST = 4000
"""Characters of a text that is shown; what is longer is cut."""


def plain_text(value: object, limit: int = LONGEST) -> str:
    """Return any value on one line, without control characters, cut at ``limit`` characters."""
    text = value if isinstance(value, str) else _repr(value)
    text = "".join(
        one if one.isprintable() else " " if one in "\n\t" else "?" for one in text[: limit + 1].strip()
    )
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _repr(value: object) -> str:
    try:
        return str(value)
    except (ValueError, RecursionError):  # integers of thousands of digits
        return "?"
