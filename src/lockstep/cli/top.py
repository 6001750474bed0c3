"""``lockstep top``: the folder of a run as it grows, in the terminal."""

from __future__ import annotations

import time

import click

EPILOG = """\b
Examples:
  lockstep top runs/gpt
  lockstep top --every 0.5 runs/gpt
  lockstep top --once runs/gpt
\b
Ctrl-C leaves, and leaves the run alone.
\b
Exit codes: 0: the run was shown. 2: RUN is not the folder of a run.
"""


@click.command("top", epilog=EPILOG)
@click.argument("run")
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
def command(run: str, every: float, once: bool) -> None:
    """Watch a run: its loss, throughput, where a step's time goes, how fast each rank is, and what happened last.

    RUN is the folder of a run (<project_dir>/run), or the folder of its project. It is only read, so any number of
    people may look.
    """
    from rich.console import Console, RenderableType
    from rich.live import Live

    from lockstep.history.read import read_run
    from lockstep.report.live import NEWEST_BYTES, screen

    def looked() -> RenderableType:
        return screen(read_run(run, NEWEST_BYTES), time.time())

    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(looked())
        return
    with Live(looked(), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                live.update(looked(), refresh=True)
        except KeyboardInterrupt:
            pass
    console.print(looked())
