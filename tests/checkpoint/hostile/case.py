"""One way in which a checkpoint is hostile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from checkpoint.draft import Draft

WEIGHT, EXP_AVG = "model.0.0.weight", "optimizer.0.state.0.0.weight.exp_avg"

Change = Callable[[Draft], object]


@dataclass(frozen=True)
class Case:
    """``fate``: what may become of it.

    "refused": an error, and nothing has been changed. "refused late": an error of what only the object itself can
    judge, while states are put in. "harmless": it loads, as data without meaning or without use.
    """

    name: str
    change: Change
    fate: str = "refused"


def setting(place: Callable[[Draft], Any], key: Any, value: Any) -> Change:
    def change(draft: Draft) -> None:
        place(draft)[key] = value

    return change


def several(
    what: str, place: Callable[[Draft], Any], key: Any, values: Iterable[Any], fate: str = "refused"
) -> Iterator[Case]:
    for value in values:
        yield Case(f"{what} {repr(value)[:60]}", setting(place, key, value), fate)
