"""A plan as a JSON document, in which it goes to another machine or to a later job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from lockstep.config.hosts import Host
from lockstep.errors import ConfigError
from lockstep.launch.machines import Transport
from lockstep.launch.plan import FaultPolicy, LaunchPlan

MAX_BYTES = 16 * 1024 * 1024


def plan_as_data(plan: LaunchPlan) -> dict[str, object]:
    """A plan in plain data, without the origins of its settings."""
    data = {item.name: getattr(plan, item.name) for item in fields(plan) if item.name != "settings"}
    return data | {"survival": asdict(plan.survival), "reach": asdict(plan.reach)}


def plan_from_data(data: Any) -> LaunchPlan:
    """The plan that ``plan_as_data`` wrote.

    Raises:
        ConfigError: it did not write this.
    """
    try:
        values = dict(data)
        reach = dict(values.pop("reach"))
        hosts = tuple(Host(**host) for host in reach.pop("hosts"))
        forward = tuple(reach.pop("forward_env"))
        command = tuple(values.pop("command"))
        survival = FaultPolicy(**values.pop("survival"))
        if not command or not all(isinstance(word, str) for word in command):
            raise TypeError("command")
        where = Transport(hosts=hosts, forward_env=forward, **reach)
        return LaunchPlan(command=command, survival=survival, reach=where, **values)
    except (TypeError, ValueError, KeyError, AttributeError):
        raise ConfigError(
            "The plan that arrived is not one of this version of Lockstep. Install the same version everywhere."
        ) from None


def as_line(data: Mapping[str, object]) -> str:
    """JSON in one line of ASCII; names and arguments that are not UTF-8 survive it."""
    return json.dumps(data, ensure_ascii=True, allow_nan=False)


def from_line(line: bytes | str) -> dict[str, object]:
    """The object of a line; raises ConfigError when it is none."""
    try:
        data = json.loads(line) if len(line) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise ConfigError("What arrived is not a plan. Start this program by `lockstep launch`.")
    return data
