"""What a run said of itself when it started."""

from __future__ import annotations

from lockstep.history.events import RunEvent
from lockstep.history.text import plain_text


def configuration(start: RunEvent | None) -> list[tuple[str, str, str]]:
    """(name, value, source) of every setting that the start of a run names."""
    if start is None:
        return []
    rows = [one for one in start.items("configuration") if type(one) is dict]
    return [
        (_text(row.get("name"), 120), _text(row.get("value"), 400), _text(row.get("source"), 200))
        for row in rows
    ]


def environment(start: RunEvent | None) -> list[tuple[str, str]]:
    """(name, value): the machine, versions, and what else the start of a run names as its environment."""
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
