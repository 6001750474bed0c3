"""The page of all commands with their options and examples, from the commands themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from lockstep.cli import cli
from tests.site.pages import cell, table

ELSEWHERE = {
    "launch": "Its options, with the keys of files and the variables that say the same, are in "
    "[Configuration](configuration.md).",
}
HEAD = """# Commands

This page is for people who use the command `lockstep`. You will find every command here, with each of its options and
an example.

Each command prints the same in the terminal with `--help`. Commands end with code 0 when all is well, and with 2 when
they were called wrongly: [exit codes](exit-codes.md).

<!-- Written by python -m tests.site: do not edit. -->
"""


def walk() -> Iterator[tuple[str, click.Command]]:
    """(words, command) of every command, those of ``lockstep accelerate`` left out: they are Accelerate's."""
    for name in cli.list_commands(click.Context(cli)):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group) and name != "accelerate":
            for below in command.list_commands(click.Context(command)):
                found = command.get_command(click.Context(command), below)
                assert found is not None
                yield f"{name} {below}", found


def options_of(command: click.Command) -> list[click.Option]:
    """The options that its help shows."""
    context = click.Context(command)
    shown = [one for one in command.get_params(context) if isinstance(one, click.Option) and not one.hidden]
    return [one for one in shown if "--help" not in one.opts]


def examples(command: click.Command) -> list[str]:
    """The lines of its help's examples."""
    epilog = inspect.cleandoc(command.epilog or "").replace("\b", "")
    _, found, text = epilog.partition("Examples:")
    return [line[2:] for line in re.split(r"\n\s*\n", text)[0].splitlines() if line.strip()] if found else []


def entry(words: str, command: click.Command) -> str:
    """A command's section."""
    level = "#" * (2 + words.count(" "))
    parts = [f"{level} lockstep {words}\n"]
    help = inspect.cleandoc((command.help or "").replace("\b", "").replace("\f", ""))
    parts.append(f"{help}\n")
    usage = " ".join(command.collect_usage_pieces(click.Context(command, info_name=words)))
    parts.append(f"```text\nlockstep {words} {usage}\n```\n")
    name = words.partition(" ")[0]
    if words in ELSEWHERE:
        parts.append(f"{ELSEWHERE[words]}\n")
    else:
        rows = [
            [", ".join(f"`{word}`" for word in [*one.opts, *one.secondary_opts]), cell(one.help or "")]
            for one in options_of(command)
        ]
        if rows:
            parts.append(table(["option", "what it does"], rows))
    lines = examples(command)
    if lines and name != "accelerate":
        parts.append("```console\n" + "".join(f"{line}\n" for line in lines) + "```\n")
    return "\n".join(parts)


def page() -> str:
    return HEAD + "\n" + "\n".join(entry(words, command) for words, command in walk())
