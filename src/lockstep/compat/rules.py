"""What becomes of each key of a foreign configuration: tables of rules, and what applies them.

A table is a mapping from keys to rules, or to tables for sections. Every key that is not in it is refused, so
that nothing is ignored by accident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.files import check_depth
from lockstep.config.merge import merge_settings
from lockstep.config.settings import SETTINGS
from lockstep.config.values import FALSE_WORDS, SettingValue, repr_short, suggestion
from lockstep.errors import ConfigError

AUTO = "auto"


@dataclass(frozen=True)
class Used:
    """``read(value, key)`` is the value of the setting ``to``, or None for nothing said.

    With an empty ``to`` it is a mapping of such settings.
    """

    to: str
    read: Callable[[object, str], Any]


def same(setting: str) -> Used:
    """Return a key with the meaning, and so the values, of a setting of ours."""
    return Used(setting, SETTINGS[setting].kind.read)


@dataclass(frozen=True)
class NoEffect:
    """Accepted; ``why`` is said when the value asks for something other than ``default``."""

    why: str
    default: tuple[object, ...] = ()
    read: Callable[[object, str], object] | None = None


@dataclass(frozen=True)
class Refused:
    """An error when the value asks for something other than ``default``; ``instead`` is a sentence: what to do."""

    what: str
    default: tuple[object, ...] = ()
    instead: str = "Remove it."


@dataclass(frozen=True)
class Detail:
    """Has a meaning only together with another key, which speaks for it."""

    of: str


KeyRule = Used | NoEffect | Refused | Detail
Table = Mapping[str, "KeyRule | Table"]


@dataclass(frozen=True)
class Translation:
    """A foreign configuration in our settings; ``settings`` has only those that were said."""

    settings: Mapping[str, SettingValue]
    warnings: tuple[str, ...] = ()


def section(rule: NoEffect | Refused, *keys: str) -> Table:
    """Return a section that ``enabled`` switches; the other keys are its details."""
    return {"enabled": rule, **{key: Detail("enabled") for key in keys}}


def is_off(value: object) -> bool:
    """Return whether a value asks for nothing: empty, null, off, or a section of such."""
    if isinstance(value, Mapping):
        return all(is_off(item) for item in value.values())
    if isinstance(value, str):
        return value.strip().lower() in FALSE_WORDS | {"", "none"}
    return value is None or value is False or value == []


def translate(table: Table, data: object, where: str, prefix: str = "") -> Translation:
    """Apply a table; ``where`` begins the messages. Keys of one setting must agree.

    Raises:
        ConfigError: a key is unknown, refused, or has a value that is not allowed.
    """
    check_depth(data, where)
    found: list[dict[str, SettingValue]] = []
    warnings = []
    try:
        for rule, path, value in _entries(table, data, prefix):
            settings, without_effect = _apply(rule, path, value)
            source = f"{path}={repr_short(value)}"
            found.append({name: SettingValue(item, f"{source} ({where})") for name, item in settings.items()})
            if without_effect:
                warnings.append(f"{where}: {source} has no effect: {without_effect}.")
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return Translation(merge_settings(*found), tuple(warnings))


def _entries(table: Table, data: object, prefix: str) -> Iterator[tuple[KeyRule, str, object]]:
    """Yield the rule, path and value of each key that has a value."""
    if not isinstance(data, Mapping):
        at = prefix.rstrip(".") + ": " if prefix else ""
        raise ConfigError(f"{at}{repr_short(data)} is not a section of keys. Write keys and values below it.")
    for key, value in data.items():
        path = f"{prefix}{key}"
        rule = table.get(key) if isinstance(key, str) else None
        if rule is None:
            near = suggestion(str(key), table) or f" Known keys: {', '.join(list(table)[:8])} ..."
            raise ConfigError(f"{repr_short(path)[1:-1]}: this key is not known.{near}")
        if isinstance(rule, Mapping):
            yield from () if value is None else _entries(rule, value, path + ".")
        elif value is not None:
            yield rule, path, value


def _apply(rule: KeyRule, path: str, value: object) -> tuple[Mapping[str, object], str]:
    """Return the settings that a key says, and why it has no effect if it asks for something."""
    if isinstance(rule, Detail) or (isinstance(value, str) and value == AUTO):
        return {}, ""
    try:
        if isinstance(rule, Used):
            result = rule.read(value, path)
            return (result if not rule.to else {} if result is None else {rule.to: result}), ""
        if isinstance(rule, NoEffect) and rule.read is not None:
            rule.read(value, path)
    except ConfigError as error:
        raise ConfigError(str(error) if str(error).startswith(path) else f"{path}: {error}") from None
    if not _asks_for_something(value, rule.default):
        return {}, ""
    if isinstance(rule, NoEffect):
        return {}, rule.why
    raise ConfigError(
        f"{path}={repr_short(value)} asks for {rule.what}, which is not available. {rule.instead}"
    )


def _asks_for_something(value: object, default: tuple[object, ...]) -> bool:
    # A section with a switch.
    if isinstance(value, Mapping) and "enabled" in value:
        value = value["enabled"]
    return not _is_one_of(value, default) if default else not is_off(value)


def _is_one_of(value: object, known: Iterable[object]) -> bool:
    text = value.lower() if isinstance(value, str) else value
    return any(type(text) in (bool, int, float, str, list) and text == item for item in known)
