"""``lockstep top``: a run as it goes on, in the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

EPILOG = """\b
Examples:
  lockstep top runs/gpt
  lockstep top --every 0.5 runs/gpt
  lockstep top --once runs/gpt
\b
Exit codes: 0 the run was shown; 2 RUN is no run's folder.
"""


@click.command("top", epilog=EPILOG)
@click.argument("run", metavar="RUN")
@click.option(
    "--every",
    type=click.FloatRange(min=0.1, max=3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@click.option("--once", is_flag=True, help="Show it once; so does a run whose output is no terminal.")
def command(run: str, every: float, once: bool) -> None:
    """Watch a run: its loss, throughput, where a step's time goes, how long each rank takes, and what happened last.
    RUN is the folder that a run writes (<project_dir>/run), or its project's, on this machine or on a disk that both
    share. It only reads: any number of people may look. Ctrl-C ends it, and leaves the run alone."""
    from rich.console import Console

    console = Console(highlight=False)
    shown = _screen(run)
    if once or not console.is_terminal:
        console.print(shown)
        return
    _follow(console, shown, run, every)


def _follow(console: Console, shown: RenderableType, run: str, every: float) -> None:
    from rich.live import Live

    try:
        with Live(shown, console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                time.sleep(every)
                live.update(_screen(run), refresh=True)
    except KeyboardInterrupt:
        console.print(_screen(run))


def _screen(run: str) -> RenderableType:
    from lockstep.history.read import read_run
    from lockstep.report.live import NEWEST_BYTES, screen

    return screen(read_run(run, NEWEST_BYTES), time.time())
