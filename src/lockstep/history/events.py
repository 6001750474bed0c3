"""What happened in a run besides its steps: the lines of ``events.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.history.columns import BOUNDS, bounded
from lockstep.history.text import plain_text


@dataclass(frozen=True)
class RunEvent:
    """One event: its name, when it was (seconds since 1970), in which start of the run, at which optimizer step; NaN:
    not known. ``fields``: the line."""

    name: str
    time: float
    attempt: int
    step: float
    fields: Mapping[str, Any]

    def text(self, key: str) -> str:
        """Empty, if it is not there."""
        value = self.fields.get(key)
        return "" if value is None else plain_text(value)

    def number(self, key: str) -> float:
        return bounded(self.fields.get(key))

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.fields.get(key)
        return value if type(value) is dict else {}

    def items(self, key: str) -> list[Any]:
        value = self.fields.get(key)
        return value if type(value) is list else []

    @property
    def sentence(self) -> str:
        """What the run itself says of it."""
        return self.text("sentence") or self.text("reason") or self.text("message")


def event_of(line: Mapping[str, object]) -> RunEvent | None:
    """None for a line that names no event."""
    name = line.get("event")
    if type(name) is not str:
        return None
    attempt = bounded(line.get("attempt"), BOUNDS["attempt"])
    return RunEvent(
        name=name,
        time=bounded(line.get("time"), BOUNDS["time"]),
        attempt=int(attempt) if math.isfinite(attempt) else 0,
        step=bounded(line.get("step"), BOUNDS["step"]),
        fields=line,
    )


def named(events: Iterable[RunEvent], *names: str) -> list[RunEvent]:
    """Those of these names, in their order."""
    return [event for event in events if event.name in names]
