"""The command ``lockstep``: finds a subcommand by name and imports only that one."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Mapping
from typing import Any

import click

from lockstep import __version__
from lockstep.cli.output import ERROR
from lockstep.errors import LockstepError
from lockstep.words import escaped_lines

BAD_INPUT = 2

# name -> (module, one line of help); a subcommand is the object `command` in its module, or what is named after a colon
COMMANDS = {
    "launch": ("lockstep.cli.launch", "Run a training script on one or more processes."),
    "config": ("lockstep.cli.config", "Write a configuration file for launch."),
    "env": ("lockstep.cli.env", "Show what this machine and installation have."),
    "estimate": ("lockstep.cli.estimate", "Count a model, and what fits where."),
    "checkpoint": ("lockstep.cli.checkpoint", "Verify, show, merge and convert checkpoints."),
    "check": ("lockstep.cli.check", "Prove that a script computes on many ranks what it computes on one."),
    "replay": ("lockstep.cli.replay", "Make a bad step again, and name the module that went wrong first."),
    "tune": (
        "lockstep.cli.tune",
        "Find the micro-batch that fits, and the quickest one, for the same global batch.",
    ),
    "report": ("lockstep.cli.report", "Say what a run did, why it was slow and why it stopped."),
    "top": ("lockstep.cli.top", "Watch a run: loss, throughput, ranks, what happened last."),
    "schedule": ("lockstep.cli.schedule", "Show a pipeline schedule and count its bubble."),
    "test": ("lockstep.cli.test", "Check on this machine that distributed training is right."),
    "accelerate": ("lockstep.cli.accelerate", "The commands of accelerate, with its options."),
    "merge-weights": (
        "lockstep.cli.accelerate:merge_weights",
        "As in accelerate: sharded weights to one file.",
    ),
}

EPILOG = """\b
Examples:
  lockstep launch --nproc 2 train.py --epochs 3
  lockstep config --num-processes 2 --cpu
  lockstep env --no-torch
  lockstep estimate model.py:Model --memory 24GB
  lockstep check --nproc 2 --parallel zero=3 train.py
  lockstep replay runs/gpt/capsules/step-000120 train.py
  lockstep tune --nproc 2 train.py
  lockstep report runs/gpt
  lockstep top runs/gpt
  lockstep checkpoint verify run/checkpoints
  lockstep test --nproc 2
"""


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they are called; help needs none of them."""

    def __init__(self, *args: Any, commands_by_name: Mapping[str, tuple[str, str]], **other: Any) -> None:
        super().__init__(*args, **other)
        self._known = commands_by_name

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._known)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._known:
            return None
        module, _, name = self._known[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name or "command")
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] == "help":
            args = [*args[1:], "--help"]
        name = args[0].replace("_", "-") if args else ""
        if args and name not in self._known and not name.startswith("-"):
            from lockstep.config.values import suggestion

            ctx.fail(f"there is no command {args[0][:60]!r}.{suggestion(args[0], self._known)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._known.items()])


@click.group(
    cls=LazyGroup,
    commands_by_name=COMMANDS,
    epilog=EPILOG,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
)
@click.version_option(__version__, "-V", "--version", prog_name="lockstep")
def cli() -> None:
    """Distributed PyTorch training: the same script on one process or many."""


def main(argv: list[str] | None = None) -> None:
    """Entry point. Bad input ends with exit code 2 and one message, never a traceback."""
    try:
        code = cli.main(args=argv, prog_name="lockstep", standalone_mode=False)
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        click.echo(escaped_lines(shown.getvalue().replace("Error: ", ERROR, 1)), err=True, nl=False)
        code = error.exit_code
    except click.Abort:
        click.echo("Aborted.", err=True)
        code = 130
    except LockstepError as error:
        click.echo(f"{ERROR}{escaped_lines(str(error))}", err=True)
        code = BAD_INPUT
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
