"""The options of ``lockstep launch``, from the table of settings, and the command class that shows them by topic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from lockstep.cli.integers import IntegerRange
from lockstep.compat.accelerate.flags import FOREIGN_FLAGS, FOREIGN_SWITCHES, LATER_SWITCHES, UNUSED_SWITCHES
from lockstep.config.settings import TOPICS, Setting
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
            self.fail(f"{error}.", param, ctx)


def option(setting: Setting) -> click.Option:
    """The flag of a setting."""
    words, kind = [*setting.flags.split(), setting.name], setting.kind
    if kind.type is bool:
        return click.Option(words, is_flag=True, default=None, help=setting.help)
    value: click.ParamType
    if kind.words:
        value = click.Choice(list(kind.words), case_sensitive=False)
    elif kind.bounds is not None:
        value = IntegerRange(*kind.bounds)
    else:
        value = Checked(kind.metavar, kind.on_flag or kind.as_data)
    return click.Option(words, type=value, multiple=setting.is_repeated, help=setting.help)


def dashes(token: str) -> str:
    """Accelerate spells options with underscores: both forms are one."""
    return token.replace("_", "-")


def options() -> list[click.Parameter]:
    """All options, those of Accelerate's command lines hidden."""
    shown: list[click.Parameter] = [
        option(one) for settings in TOPICS.values() for one in settings if one.flags
    ]
    foreign = [click.Option(["--" + dashes(name), name], type=str, hidden=True) for name in FOREIGN_FLAGS]
    switches = [
        click.Option(["--" + dashes(name), name], is_flag=True, hidden=True)
        for name in (*LATER_SWITCHES, *FOREIGN_SWITCHES)
    ]
    unused = [
        click.Option(["--" + dashes(name), name], is_flag=True, hidden=True, expose_value=False)
        for name in UNUSED_SWITCHES
    ]
    return [*shown, *foreign, *switches, *unused]


def misplaced(ctx: click.Context, arguments: Sequence[str], script: str) -> list[str]:
    """Options of this command among the script's ``arguments``, which the script's text does not name as its own."""
    shown = {dashes(word) for one in ctx.command.params for word in one.opts if word.startswith("--")}
    words = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    found = [word for word in dict.fromkeys(words) if dashes(word) in shown]
    if not found:
        return []
    try:
        text = Path(script).read_text(errors="replace")
    except OSError:  # a module or another program
        return []
    own = dashes(text)
    return [word for word in found if dashes(word).strip("-") not in own]


class LaunchCommand(click.Command):
    """A command whose help shows the options by topic."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        of = {param.name: param for param in self.get_params(ctx)}
        for topic, settings in TOPICS.items():
            rows = [of[one.name].get_help_record(ctx) for one in settings if one.flags]
            with formatter.section(topic):
                formatter.write_dl([row for row in rows if row is not None])
        help_option = self.get_help_option(ctx)
        record = help_option.get_help_record(ctx) if help_option is not None else None
        if record is not None:
            with formatter.section("Help"):
                formatter.write_dl([record])
