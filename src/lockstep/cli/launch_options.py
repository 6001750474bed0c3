"""The options of ``lockstep launch``, from the table of settings, and the command class that shows them by topic."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import click

from lockstep.cli.values import option
from lockstep.compat.accelerate.flags import (
    FOREIGN_FLAGS,
    FOREIGN_SWITCHES,
    REFUSED,
    REFUSED_SWITCHES,
    UNUSED_FLAGS,
    UNUSED_SWITCHES,
)
from lockstep.config.settings import TOPICS

KNOWS_RANKS = re.compile(
    r"lockstep|accelerat|distributed|rank|dataparallel|lightning|fabric|deepspeed|horovod|trainer",
    re.IGNORECASE,
)
TEE_VALUE = re.compile(r"[0-3]|[0-9]+:[0-3](,[0-9]+:[0-3])*")
"""What torchrun's --tee takes: nothing, stdout, stderr or both, of all processes or of some."""


def dashes(token: str) -> str:
    """Accelerate spells options with underscores: both forms are one."""
    return token.replace("_", "-")


def options() -> list[click.Parameter]:
    """Return all options, those of Accelerate's command lines hidden."""
    shown: list[click.Parameter] = [
        option(one) for settings in TOPICS.values() for one in settings if one.flags
    ]
    values = (*FOREIGN_FLAGS, *(name for name in REFUSED if name not in REFUSED_SWITCHES))
    foreign = [click.Option(["--" + dashes(name), name], type=str, hidden=True) for name in values]
    switches = [
        click.Option(["--" + dashes(name), name], is_flag=True, hidden=True)
        for name in (*FOREIGN_SWITCHES, *REFUSED_SWITCHES)
    ]
    unused = [
        click.Option(["--" + dashes(name), name], is_flag=True, hidden=True, expose_value=False)
        for name in UNUSED_SWITCHES
    ]
    unused += [
        click.Option(["--" + dashes(name), name], type=str, hidden=True, expose_value=False)
        for name in UNUSED_FLAGS
    ]
    tee_all = click.Option(["--tee-all", "tee_all"], is_flag=True, hidden=True)
    return [*shown, *foreign, *switches, *unused, tee_all]


def misplaced(ctx: click.Context, arguments: Sequence[str], script: str) -> list[str]:
    """Options of this command among the script's ``arguments``, which the script's text does not name as its own."""
    shown = {dashes(word) for one in ctx.command.params for word in one.opts if word.startswith("--")}
    words = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    found = [word for word in dict.fromkeys(words) if dashes(word) in shown]
    if not found:
        return []
    text = text_of(script)
    return [word for word in found if text is not None and dashes(word).strip("-") not in dashes(text)]


def text_of(script: str) -> str | None:
    """Return the text of a script; None for a module or another program."""
    try:
        return Path(script).read_text(errors="replace")
    except (OSError, ValueError):
        return None


def trains_alone(script: str) -> bool:
    """Return whether the script's own text trains in plain torch, and has no word of any library that knows ranks."""
    text = text_of(script) or ""
    return ".backward(" in text and KNOWS_RANKS.search(text) is None


def reads_local_rank(script: str) -> bool:
    """Return whether a script takes its local rank from an option alone, which torch.distributed.launch passes."""
    text = text_of(script) or ""
    return re.search(r"--local[_-]rank\b", text) is not None and "LOCAL_RANK" not in text


def joined_tee(words: Sequence[str], taking_values: Collection[str]) -> list[str]:
    """Return ``words`` before the script, where ``--tee`` may be a switch or have one of torchrun's values.

    Such a value is read as one more switch; with 0, which shows nothing, there is none.
    """
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in ("-t", "--tee"):
            following = next(rest, None) if not equals else value
            is_value = following is not None and TEE_VALUE.fullmatch(following) is not None
            if not (is_value and following == "0"):
                found.append("--tee-all" if is_value else name)
            if following is None or is_value:
                continue
            if equals:
                raise click.UsageError(
                    f"--tee {following!r} is not 0, 1, 2, 3 or a list such as 0:3,1:1. Use one of these."
                )
            return [*found, *joined_tee([following, *rest], taking_values)]
        found.append(word)
        if not word.startswith("-") or word in ("-", "--"):
            break
        if not equals and dashes(word) in taking_values:
            found += [one for one in (next(rest, None),) if one is not None]
    return [*found, *rest]


class LaunchCommand(click.Command):
    """A command whose help shows the options by topic."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        taking = {
            dashes(word) for one in self.params for word in one.opts if not getattr(one, "is_flag", True)
        }
        return super().parse_args(ctx, joined_tee(args, taking))

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
