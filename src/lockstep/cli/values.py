"""Values on the command line, read as everywhere else, and the flags of settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypedDict

import click

from lockstep.config.checks import MAX_PROCESSES
from lockstep.config.settings import DECLARED, Setting
from lockstep.config.values import parse_integer
from lockstep.errors import ConfigError


class Checked(click.ParamType):
    """A value read by a function that raises ConfigError."""

    def __init__(self, name: str, parse: Callable[[object], object]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        try:
            return self._parse(value)
        except ConfigError as error:
            self.fail(f"{error}" if str(error)[-1:] in "?." else f"{error}.", param, ctx)


class IntegerRange(click.IntRange):
    """An integer within bounds."""

    def __init__(self, at_least: int, at_most: int | None = None) -> None:
        super().__init__(at_least, at_most)
        self._bounds = at_least, at_most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_integer(value, "", *self._bounds)
        except ConfigError as error:
            self.fail(f"{error}.", param, ctx)


def process_counts(text: str, flag: str, most: int) -> list[int]:
    """Return the numbers of processes in a text, which commas join; at most ``most``.

    Raises:
        ConfigError: one of them is none, or there are more.
    """
    parts = text.split(",", most)
    if len(parts) > most:
        raise ConfigError(f"{flag} has {text.count(',') + 1} numbers. Give at most {most}.")
    return [parse_integer(part, flag, 1, MAX_PROCESSES) for part in parts]


class FlagArguments(TypedDict, total=False):
    """What ``click.Option`` is told of a flag."""

    type: click.ParamType
    is_flag: bool
    default: object
    show_default: bool
    multiple: bool
    help: str


def option(setting: Setting) -> click.Option:
    """Return the flag of a setting."""
    return click.Option([*setting.flags.split(), setting.name], **_arguments(setting))


def options_of(
    *settings: str, help: Mapping[str, str] | None = None, default: Mapping[str, object] | None = None
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Give a command the flags of these settings.

    Args:
        settings: Their names.
        help: What a flag does in this command, if it is more special than in a launch.
        default: Defaults of this command. Switches without one are off.
    """

    def decorate(command: Callable[..., object]) -> Callable[..., object]:
        for one in (DECLARED[name] for name in reversed(settings)):
            arguments = _arguments(one)
            if help is not None and one.name in help:
                arguments["help"] = help[one.name]
            if default is not None and one.name in default:
                arguments |= {"default": default[one.name], "show_default": True}
            elif "is_flag" in arguments:
                arguments["default"] = False
            command = click.option(*one.flags.split(), one.name, **arguments)(command)
        return command

    return decorate


def value_type(setting: Setting) -> click.ParamType:
    """Return what click reads the setting's values by."""
    kind = setting.kind
    if kind.words:
        return click.Choice(list(kind.words), case_sensitive=False)
    if kind.bounds is not None:
        return IntegerRange(*kind.bounds)
    return Checked(kind.metavar, kind.on_flag or kind.as_data)


def _arguments(setting: Setting) -> FlagArguments:
    if setting.kind.type is bool:
        return {"is_flag": True, "default": None, "help": setting.meaning}
    return {"type": value_type(setting), "multiple": setting.is_repeated, "help": setting.meaning}
