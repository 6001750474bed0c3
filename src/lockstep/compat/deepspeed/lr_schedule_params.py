"""The parameters of learning rate schedules: which there are, and what each may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from lockstep.compat.deepspeed.lr_schedules import SCHEDULES, LRSchedule, Rate
from lockstep.config.values import integer_between, repr_short, suggestion
from lockstep.errors import ConfigError

# (value, where it stands) -> the value, or ConfigError.
Parser = Callable[[object, str], Any]


def parse_schedule(name: str, params: Mapping[str, object], groups: int) -> LRSchedule:
    """Return the schedule ``name`` of ``SCHEDULES`` for an optimizer with that many parameter groups.

    Raises:
        ConfigError: a parameter is unknown, missing, of the wrong kind or out of range.
    """
    kind = SCHEDULES[name]
    known = {field.name: field.default for field in fields(kind)}
    refuse_unknown(params, known, f"schedule {name}")
    missing = [key for key, default in known.items() if default is MISSING and params.get(key) is None]
    if missing:
        raise ConfigError(
            f"The schedule {name} needs {', '.join(missing)}. Add it to scheduler.params in the file, or pass "
            f"DummyScheduler(..., {missing[0]}=...)."
        )
    values = {}
    for key, value in params.items():
        if value is None and known[key] is None:
            continue
        values[key] = _PARSERS[key](value, f"scheduler.params.{key}")
        if isinstance(values[key], tuple) and len(values[key]) != groups:
            raise ConfigError(
                f"scheduler.params.{key} has {len(values[key])} values, but the optimizer has {groups} parameter "
                "groups. Write one number, or one for each group."
            )
    schedule: LRSchedule = kind(**values)
    return schedule


def refuse_unknown(names: Mapping[str, object], known: Mapping[str, object], what: str) -> None:
    """Raise ConfigError for names that are not known; ``what`` is the thing whose parameters they would be."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            f"The {what} has no parameter {', '.join(repr_short(name) for name in unknown)}."
            f"{suggestion(str(unknown[0]), known)} Remove it, or use one of {', '.join(known)}."
        )


def _not_negative(value: Any, origin: str) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0:
        raise ConfigError(
            f"{origin} is {repr_short(value)}, but must be a finite number of at least 0. Change it."
        )
    return value


def _rates(value: object, origin: str) -> Rate:
    if isinstance(value, (list, tuple)):
        return tuple(_not_negative(item, origin) for item in value)
    return _not_negative(value, origin)


def _warmup_type(value: object, origin: str) -> str:
    if value not in ("log", "linear"):
        raise ConfigError(f"{origin} is {repr_short(value)}, but must be 'log' or 'linear'. Use one of them.")
    return str(value)


_PARSERS: dict[str, Parser] = {
    "warmup_min_lr": _rates,
    "warmup_max_lr": _rates,
    "warmup_num_steps": integer_between(1),
    "warmup_type": _warmup_type,
    "warmup_min_ratio": _not_negative,
    "cos_min_ratio": _not_negative,
    "total_num_steps": integer_between(1),
}
