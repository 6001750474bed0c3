"""``lockstep top``: a run as it goes on, in the terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.cli.top_screen import TopScreen


@contextmanager
def keyboard() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits so many seconds for a key, and returns it; "": none was pressed.

    None is where standard input is no terminal. Ctrl-C interrupts as ever.
    """
    descriptor = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None

    def pressed(timeout_s: float) -> str:
        ready, _, _ = select.select([] if descriptor is None else [descriptor], [], [], timeout_s)
        # Nothing is read from a terminal that is gone.
        return (os.read(ready[0], 1) or b"q").decode("ascii", "replace") if ready else ""

    if descriptor is None:
        yield pressed
        return
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


EPILOG = """\b
Examples:
  lockstep top runs/gpt
  lockstep top
  lockstep top 10.0.0.1:29500
  lockstep top --every 0.5 runs/gpt
  lockstep top --once runs/gpt
\b
Keys: d: show stacks. x, then y: save and stop after this step. q: quit top (the run continues).
\b
Exit codes: 0: the run was shown. 2: RUN is not the folder of a run, or nothing answers at HOST:PORT.
"""
KEY_S = 0.05


@click.command("top", epilog=EPILOG)
@click.argument("run", metavar="[RUN | HOST:PORT]", required=False)
@click.option(
    "--every",
    type=click.FloatRange(min=0.1, max=3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@click.option(
    "--once", is_flag=True, help="Show it once, and end. This is the default if the output is not a terminal."
)
@click.option(
    "--secret-file",
    metavar="FILE",
    help="The secret of the launch at HOST:PORT (default: of a launch here, LOCKSTEP_SECRET, or the user's own).",
)
def command(run: str | None, every: float, once: bool, secret_file: str | None) -> None:
    """Watch a run: its loss, throughput, where a step's time goes, what each rank does now, and what happened last.

    RUN is the folder of a run (<project_dir>/run), or the folder of its project. HOST:PORT is the address of a launch.
    Without an argument, top finds your launch on this machine. A folder is only read, so any number of people may look.
    Only the user of a launch can ask the launch itself, because only they can read its secret.
    """
    from rich.console import Console

    console = Console(highlight=False)
    screen = _screen(run, secret_file)
    try:
        if once or not console.is_terminal:
            console.print(screen.rendered(keys=False))
        else:
            _follow(console, screen, every)
    finally:
        screen.close()


def _screen(run: str | None, secret_file: str | None) -> TopScreen:
    from lockstep.cli.top_screen import TopScreen
    from lockstep.config.values import parse_endpoint
    from lockstep.errors import ConfigError
    from lockstep.launch.job import connect_here, connect_to

    if run is None:
        connection = connect_here()
        if connection is None:
            raise ConfigError(
                "No launch of yours runs on this machine. Name a run's folder, or HOST:PORT of a launch on "
                "another machine."
            )
        return TopScreen(None, connection)
    if ":" in run and not os.path.lexists(run):
        return TopScreen(None, connect_to(parse_endpoint(run), secret_file))
    screen = TopScreen(run, None)
    screen.connect()
    return screen


def _follow(console: Console, screen: TopScreen, every: float) -> None:
    from rich.live import Live

    try:
        with keyboard() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
            looked, is_new = time.monotonic(), True
            while not screen.is_over:
                if is_new:
                    live.update(screen.rendered(), refresh=True)
                key = pressed(KEY_S)
                if key == "q":
                    break
                if key:
                    screen.take_key(key)
                is_new = screen.take_news() or bool(key)
                if time.monotonic() - looked >= every:
                    looked, is_new = time.monotonic(), True
                    screen.look()
    except KeyboardInterrupt:
        pass
    console.print(screen.rendered(keys=False))
    if stacks := screen.stacks_text():
        click.echo(stacks)
    if screen.is_over:
        click.echo(screen.notice, err=True)
