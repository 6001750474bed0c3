"""Numbers and lists in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence


def count(number: int, noun: str, plural: str = "") -> str:
    """1 tensor; 1,234 tensors."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(words: Sequence[str], last: str = "and") -> str:
    """a, b and c."""
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else "".join(words)


def of_ranks(ranks: Sequence[int]) -> str:
    """Rank 2; ranks 2 and 3; ranks 0 to 5."""
    ordered = sorted(set(ranks))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    return f"ranks {indices(ordered)}"


def indices(numbers: Sequence[int]) -> str:
    """2 and 3; 0 to 5; 0 to 3 and 7."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    said: list[str] = []
    for run in runs:
        said += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    if len(said) > 8:
        said = [*said[:7], f"{len(said) - 7} more"]
    return listed(said)


def size(number: float) -> str:
    """A distance with two digits: 3e-7, 0.21, 12."""
    if not math.isfinite(number):
        return "infinite"
    if number == 0:
        return "0"
    return f"{number:.2g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def value(number: float) -> str:
    """A number of the run with the digits in which two may differ."""
    return f"{number:.7g}"
