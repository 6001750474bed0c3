"""``lockstep schedule``: what each rank of a pipeline does when, and how long it does nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from lockstep.cli.output import print_table

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.plan.schedule import Timeline
    from lockstep.plan.schedule_case import ScheduleCase

STYLES = {
    "F": "black on bright_blue",
    "B": "black on yellow",
    "I": "black on bright_red",
    "W": "black on green",
}

NOTES = (
    "bubble: idle share of all ranks, from the first action to the last. waiting: idle share of a rank between its "
    "first and last action. step: how long one step takes, in the units of --times, divided by the stages on a rank. "
    "in flight: the most micro-batches whose activations a rank holds at once. Sending takes no time here."
)

EPILOG = """\b
Examples:
  lockstep schedule 1f1b --ranks 4 --micro-batches 8
  lockstep schedule interleaved --ranks 4 --micro-batches 8 --stages-per-rank 3
  lockstep schedule zbv --ranks 4 --micro-batches 8
  lockstep schedule zero_bubble --times 1,1.2,0.8
  lockstep schedule --compare --ranks 4 --micro-batches 8
"""


@click.command("schedule", epilog=EPILOG)
@click.argument("name", required=False)
@click.option("--ranks", default="4", metavar="P", help="Ranks of the pipeline (default: 4).")
@click.option("--micro-batches", default="8", metavar="M", help="Micro-batches in a step (default: 8).")
@click.option(
    "--stages-per-rank", default="0", metavar="V", help="Stages on each rank (default: by schedule)."
)
@click.option("--times", default="1,2", metavar="F,B|F,I,W",
              help="Times of forward and backward of a stage (default: 1,2), or of forward, backward of the "
              "input and backward of the weights. Two numbers divide the backward in halves.")  # fmt: skip
@click.option("--compare", is_flag=True, help="One row for each schedule.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    name: str | None,
    ranks: str,
    micro_batches: str,
    stages_per_rank: str,
    times: str,
    compare: bool,
    as_json: bool,
) -> None:
    """Show the order in which torch runs a pipeline schedule (gpipe, 1f1b, interleaved, zero_bubble, zbv or
    dualpipev), and count the bubble in it. No processes are started."""
    from lockstep.config.values import parse_integer
    from lockstep.plan.schedule_case import compared, counted, parse_times

    if compare == (name is not None):
        what = f"--compare is for all schedules, not {name!r} alone" if name else "No schedule is named"
        raise click.UsageError(f"{what}. Give a schedule, such as 1f1b, or --compare, but not both.")
    if compare and stages_per_rank != "0":
        raise click.UsageError(
            "--stages-per-rank belongs to one schedule, but --compare shows all. Name one, or drop it."
        )
    most = 10**6
    sizes = (
        parse_integer(ranks, "--ranks", 1, most),
        parse_integer(micro_batches, "--micro-batches", 1, most),
        parse_integer(stages_per_rank, "--stages-per-rank", 0, most),
    )
    spent = parse_times(times)
    cases = compared(*sizes[:2], spent) if name is None else [counted(name, *sizes, spent)]
    if as_json:
        facts = [case.facts() for case in cases]
        click.echo(json.dumps(facts if compare else facts[0], indent=2))
        return
    _print(cases, with_timeline=not compare)


def _print(cases: list[ScheduleCase], with_timeline: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 110
    console.print(Text(cases[0].sizes if len(cases) > 1 else cases[0].title), style="bold")
    titles = ("schedule", "stages", "bubble", "waiting", "step", "in flight")
    rows = [case.cells() for case in cases]
    print_table(titles, rows, right=("stages", "bubble", "waiting", "step"))
    if with_timeline and cases[0].timeline is not None:
        _print_timeline(console, cases[0].timeline)
    console.print(Text(f"\n{NOTES}"))


def _print_timeline(console: Console, timeline: Timeline) -> None:
    from rich.text import Text

    from lockstep.plan.schedule_picture import text_rows

    rows = text_rows(timeline)
    if not rows:
        console.print(Text("\nThe timeline is too long for text. Take fewer micro-batches."))
        return
    lines = [Text.assemble(*((text, STYLES.get(kind, "")) for text, kind in row)) for row in rows]
    label = len(f"rank {len(rows)} ")
    room = max(20, console.width - label) if console.is_terminal else len(lines[0])
    for start in range(0, len(lines[0]), room):
        console.print()
        for rank, line in enumerate(lines):
            console.print(Text(f"rank {rank} ".ljust(label)) + line[start : start + room], soft_wrap=True)
