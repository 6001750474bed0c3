"""``lockstep top``: a run as it goes on, in the terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.cli.top_screen import TopScreen


class Keyboard:
    """Reads keys as they are pressed, inside of a ``with``; none where standard input is no terminal.

    Ctrl-C interrupts as ever.
    """

    def __init__(self) -> None:
        self._descriptor = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[object] | None = None

    def __enter__(self) -> Keyboard:
        if self._descriptor is not None:
            self._before = termios.tcgetattr(self._descriptor)
            tty.setcbreak(self._descriptor)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None and self._before is not None:
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def pressed(self, timeout_s: float) -> str:
        """The next key within so many seconds; "": none."""
        if self._descriptor is None:
            select.select([], [], [], timeout_s)
            return ""
        ready, _, _ = select.select([self._descriptor], [], [], timeout_s)
        if not ready:
            return ""
        key = os.read(self._descriptor, 1)
        if not key:  # the terminal is gone
            self._descriptor = None
        return key.decode("ascii", "replace")


EPILOG = """\b
Examples:
  lockstep top runs/gpt
  lockstep top
  lockstep top 10.0.0.1:29500
  lockstep top --every 0.5 runs/gpt
  lockstep top --once runs/gpt
\b
Keys, where the job can be reached: d dumps all ranks' stacks, s has all ranks save at the next step boundary, x and
then y has them stop there, as SIGTERM does. q or Ctrl-C leaves, and leaves the run alone.
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
        with (
            Keyboard() as keyboard,
            Live(
                screen.rendered(), console=console, screen=True, auto_refresh=False, vertical_overflow="crop"
            ) as live,
        ):
            looked = time.monotonic()
            while not screen.is_over:
                key = keyboard.pressed(KEY_S)
                if key == "q":
                    break
                is_new = screen.take_key(key) if key else False
                is_new = screen.take_news() or is_new
                if time.monotonic() - looked >= every:
                    looked = time.monotonic()
                    screen.look()
                    is_new = True
                if is_new:
                    live.update(screen.rendered(), refresh=True)
    except KeyboardInterrupt:
        pass
    console.print(screen.rendered(keys=False))
    if stacks := screen.stacks_text():
        click.echo(stacks)
    if screen.is_over:
        click.echo(screen.notice, err=True)
