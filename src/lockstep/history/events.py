"""What happened in a run besides its steps, and what it said of itself when it started: ``events.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lockstep.config.files import JsonObject
from lockstep.history.columns import BOUNDS, bounded
from lockstep.words import LONGEST, plain_text


@dataclass(frozen=True)
class JsonFields:
    """An object of JSON of which nothing is known: any of its ``fields`` may be missing, or be anything."""

    fields: Mapping[str, object]

    def text(self, key: str, limit: int = LONGEST) -> str:
        """Return it on one line, without control characters; empty, if it is not there."""
        value = self.fields.get(key)
        return "" if value is None else plain_text(value, limit)

    def number(self, key: str) -> float:
        return bounded(self.fields.get(key))

    def mapping(self, key: str) -> JsonObject:
        value = self.fields.get(key)
        return value if type(value) is dict else {}

    def items(self, key: str) -> list[object]:
        value = self.fields.get(key)
        return value if type(value) is list else []

    def objects(self, key: str) -> list[JsonFields]:
        """Return the objects of a list."""
        return [JsonFields(one) for one in self.items(key) if type(one) is dict]


@dataclass(frozen=True)
class RunEvent(JsonFields):
    """One event: its name, when it was (seconds since 1970), in which start of the run, at which optimizer step; NaN:
    not known. ``fields``: the line."""

    name: str
    time: float
    attempt: int
    step: float

    @property
    def sentence(self) -> str:
        """What the run itself says of it."""
        return self.text("sentence") or self.text("reason") or self.text("message")


def event_of(line: Mapping[str, object]) -> RunEvent | None:
    """Parse a line of events; None where it names no event."""
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
    """Return the events of these names, in their order."""
    return [event for event in events if event.name in names]


def configuration(start: RunEvent | None) -> list[tuple[str, str, str]]:
    """Return (name, value, source) of every setting that the start of a run names."""
    if start is None:
        return []
    rows = [one for one in start.items("configuration") if type(one) is dict]
    return [
        (_text(row.get("name"), 120), _text(row.get("value"), 400), _text(row.get("source"), 200))
        for row in rows
    ]


def environment(start: RunEvent | None) -> list[tuple[str, str]]:
    """Return (name, value): the machine, versions, and what else the start of a run names as its environment."""
    if start is None:
        return []
    facts = [
        ("device", start.text("device")),
        ("ranks", start.text("world_size")),
        ("machines", start.text("nodes")),
        ("parallel", start.text("parallel")),
        ("mixed precision", start.text("mixed_precision")),
        ("parameters", start.text("parameters")),
        ("seed", start.text("seed")),
    ]
    inner = [*start.mapping("versions").items(), *start.mapping("environment").items()]
    facts += [(plain_text(name, 120), _text(value, 400)) for name, value in inner]
    return [(name, value) for name, value in facts if value]


def _text(value: object, limit: int) -> str:
    return "" if value is None else plain_text(value, limit)
