"""The JSON schema of configuration files and the table of variables, from the table of settings."""

from __future__ import annotations

import json
import types
from typing import Any, get_args, get_origin

from lockstep.config import IN_FILES, TOPICS, Setting
from tests.site.pages import table

NAMES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def described(setting: Setting) -> dict[str, Any]:
    """The schema of one key."""
    kind = setting.kind
    text = setting.meaning or setting.values
    found: dict[str, Any] = {"description": text} if text else {}
    if kind.words:
        found["enum"] = list(kind.words)
    elif setting.name == "num_machines":  # a number, or "1:4"
        found["type"] = ["integer", "string"]
    elif kind.bounds:
        found |= {"type": "integer", "minimum": kind.bounds[0], "maximum": kind.bounds[1]}
    elif kind.is_section or get_origin(kind.type) is dict:
        found["type"] = "object"
    elif get_origin(kind.type) is tuple:
        found["type"] = ["array", "string"]
    elif isinstance(kind.type, types.UnionType) or get_args(kind.type):
        pass
    elif kind.type in NAMES and kind.type is not str:
        found["type"] = NAMES[kind.type]
    return found


def schema() -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration file of lockstep launch",
        "type": "object",
        "properties": {name: described(setting) for name, setting in sorted(IN_FILES.items())},
    }


def text() -> str:
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def variables() -> str:
    """The table of variables that say settings."""
    rows = [
        [
            ", ".join(f"`{name}`" for name in one.variables),
            f"`{one.name}`",
            (one.meaning or one.values).replace("|", "\\|"),
        ]
        for settings in TOPICS.values()
        for one in settings
        if one.variables
    ]
    return table(["variable", "setting", "meaning"], rows)
