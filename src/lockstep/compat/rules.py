"""What becomes of each key of a foreign configuration: tables of rules, and the walk that applies them.

A table is a mapping from keys to rules, or to tables for sections. Every key that is not in it is refused, so
that nothing is ignored by accident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.config.enums import StringEnum
from lockstep.config.files import check_depth
from lockstep.config.merge import merge_settings
from lockstep.config.settings import SETTINGS
from lockstep.config.values import FALSE_WORDS, SettingValue, repr_short, suggestion
from lockstep.errors import ConfigError

AUTO = "auto"
NOTHING = "asks for nothing"


@dataclass(frozen=True)
class Used:
    """``read(value, key)`` is the value of the setting ``to``, or None for nothing said.

    With an empty ``to`` it is a mapping of such settings.
    """

    to: str
    read: Callable[[object, str], Any]


def same(setting: str) -> Used:
    """A key with the meaning, and so the values, of a setting of ours."""
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


class Outcome(StringEnum):
    """What became of a key."""

    USED = "used"
    AUTO = "auto"
    OFF = "off"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


class Row(NamedTuple):
    """One key: its value, what became of it, in words, and the settings that it says."""

    path: str
    value: object
    outcome: Outcome
    text: str
    settings: Mapping[str, object] = {}


@dataclass(frozen=True)
class Translation:
    """A foreign configuration in our settings; ``settings`` has only those that were said."""

    settings: Mapping[str, SettingValue]
    warnings: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()


def section(rule: NoEffect | Refused, *keys: str) -> Table:
    """A section that ``enabled`` switches; the other keys are its details."""
    return {"enabled": rule, **{key: Detail("enabled") for key in keys}}


def is_off(value: object) -> bool:
    """Whether a value asks for nothing: empty, null, off, or a section of such."""
    if isinstance(value, Mapping):
        return all(is_off(item) for item in value.values())
    if isinstance(value, str):
        return value.strip().lower() in FALSE_WORDS | {"", "none"}
    return value is None or value is False or value == []


def walk(table: Table, data: object, prefix: str = "") -> Iterator[Row]:
    """One row for each key of ``data``."""
    if not isinstance(data, Mapping):
        yield Row(
            prefix.rstrip("."),
            data,
            Outcome.REFUSED,
            f"{repr_short(data)} is not a section of keys. Write keys and values below it.",
        )
        return
    for key, value in data.items():
        path = f"{prefix}{key}"
        rule = table.get(key) if isinstance(key, str) else None
        if rule is None:
            near = suggestion(str(key), table) or f" Known keys: {', '.join(list(table)[:8])} ..."
            yield Row(repr_short(path)[1:-1], value, Outcome.REFUSED, f"this key is not known.{near}")
        elif isinstance(rule, Mapping):
            if value is not None:
                yield from walk(rule, value, path + ".")
        else:
            yield _row(rule, path, value)


def _row(rule: KeyRule, path: str, value: object) -> Row:
    try:
        return _apply(rule, path, value)
    except ConfigError as error:
        return Row(path, value, Outcome.REFUSED, str(error).removeprefix(f"{path}"))


def _apply(rule: KeyRule, path: str, value: object) -> Row:
    if isinstance(value, str) and value == AUTO:
        if isinstance(rule, Used):
            return Row(path, value, Outcome.AUTO, "what the code says")
        return Row(path, value, Outcome.OFF, rule.why if isinstance(rule, NoEffect) else NOTHING)
    if value is None:
        return Row(path, value, Outcome.OFF, NOTHING)
    if isinstance(rule, Detail):
        return Row(path, value, Outcome.OFF, f"a detail of {rule.of}")
    if isinstance(rule, Used):
        result = rule.read(value, path)
        settings = result if not rule.to else {} if result is None else {rule.to: result}
        text = ", ".join(f"{name}={_short(item)}" for name, item in settings.items())
        return Row(path, value, Outcome.USED if settings else Outcome.OFF, text or NOTHING, settings)
    if isinstance(rule, NoEffect) and rule.read is not None:
        rule.read(value, path)
    asks = _asks_for_something(value, rule.default)
    if isinstance(rule, NoEffect):
        why = rule.why if asks or rule.default else NOTHING
        return Row(path, value, Outcome.NO_EFFECT if asks else Outcome.OFF, why)
    if asks:
        text = f"={repr_short(value)} asks for {rule.what}, which is not available. {rule.instead}"
        return Row(path, value, Outcome.REFUSED, text)
    return Row(path, value, Outcome.OFF, NOTHING)


def _asks_for_something(value: object, default: tuple[object, ...]) -> bool:
    # A section with a switch.
    if isinstance(value, Mapping) and "enabled" in value:
        value = value["enabled"]
    return not _is_one_of(value, default) if default else not is_off(value)


def _is_one_of(value: object, known: Iterable[object]) -> bool:
    text = value.lower() if isinstance(value, str) else value
    return any(type(text) in (bool, int, float, str, list) and text == item for item in known)


def _short(value: object) -> str:
    # The type is that of a described optimizer or schedule.
    text = str(getattr(value, "type", value))
    return text if len(text) <= 60 else text[:57] + "..."


def translate(table: Table, data: object, where: str, prefix: str = "") -> Translation:
    """Apply a table; ``where`` begins the messages. Keys of one setting must agree.

    Raises:
        ConfigError: a key is unknown, refused, or has a value that is not allowed.
    """
    check_depth(data, where)
    rows = tuple(walk(table, data, prefix))
    for row in rows:
        if row.outcome is Outcome.REFUSED:
            raise ConfigError(f"{where}: {joined(row)}")
    warnings = tuple(
        f"{where}: {row.path}={repr_short(row.value)} has no effect: {row.text}."
        for row in rows
        if row.outcome is Outcome.NO_EFFECT
    )
    return Translation(settings_of_rows(rows, where), warnings, rows)


def joined(row: Row) -> str:
    """Key and text of a refused row as one message."""
    return row.path + (row.text if row.text[:1] in "=:. " else f": {row.text}")


def settings_of_rows(rows: Iterable[Row], where: str) -> dict[str, SettingValue]:
    """The settings that rows say, each with its source."""
    return merge_settings(
        *(
            {
                key: SettingValue(value, f"{row.path}={repr_short(row.value)} ({where})")
                for key, value in row.settings.items()
            }
            for row in rows
        )
    )
