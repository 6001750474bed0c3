"""JSON read defensively: one object, without duplicate keys and NaN, limited in size and depth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from lockstep.config.regular_file import read_text
from lockstep.config.values import repr_short
from lockstep.errors import ConfigError

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16


def read_json(path: str | Path) -> dict[str, object]:
    """Read a file that holds one JSON object.

    Raises:
        ConfigError: the file is missing, unreadable, not UTF-8 text, too large or too deep, not JSON, or has a
            duplicate key, NaN or infinity.
    """
    name = str(path)
    text = read_text(path, MAX_BYTES, "JSON")
    return parse_json(text, name)


def parse_json(text: str, name: str) -> dict[str, object]:
    """Like :func:`read_json`, from a text; ``name`` appears in messages."""
    try:
        data = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{name}:{error.lineno}: not valid JSON: {error.msg}. Correct this line (comments are not allowed)."
        ) from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deep. Give a flat configuration.") from None
    except ValueError as error:  # ours, from the hooks; and that of int() on thousands of digits
        reason = str(error) if isinstance(error, ConfigError) else "a number has too many digits"
        raise ConfigError(f"{name}: {reason.rstrip('.')}. Correct it.") from None
    if not isinstance(data, dict):
        raise ConfigError(
            f"{name}: the top level must be an object {{...}}, not {repr_short(data)}. Correct it."
        )
    check_depth(data, name)
    return data


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise ConfigError(f"the key {repr_short(key)} is given twice")
        data[key] = value
    return data


def _constant(word: str) -> NoReturn:
    raise ConfigError(f"{word} is not a value of JSON")


def check_depth(data: object, where: str, depth: int = 0) -> None:
    """Raise ConfigError when mappings and lists are nested too deep, as one that contains itself is."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"{where}: nested deeper than {MAX_DEPTH}. Give a flat configuration.")
    if isinstance(data, Mapping):
        for value in data.values():
            check_depth(value, where, depth + 1)
    elif isinstance(data, (list, tuple)):
        for value in data:
            check_depth(value, where, depth + 1)
