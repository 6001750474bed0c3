"""A launch that runs on one screen: its ranks as the watch sees them, their stacks, what was said."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lockstep.report.job import JobNow, RankNow, RankStack
from lockstep.report.live import MOST_RANKS, bar, sparkline
from lockstep.words import digits, duration, percent, short, whole

KEYS = (("d", "dump all ranks' stacks"), ("s", "save"), ("x", "stop"), ("q", "leave"))
STILL_S = 5.0
"""So long a rank may be still before that is marked; as long as the watch waits for a hang."""
MOST_SENTENCES = 4
STACK_LINES = 12


def job_screen(job: JobNow, losses: Sequence[float], now: float) -> RenderableType:
    """All that is known of a launch of which no folder is at hand. ``losses``: those that were seen."""
    title = Text.assemble((job.run, "bold"), ("  running", "green"), f"  {duration(job.elapsed)}")
    parts: list[RenderableType] = [title]
    if math.isfinite(job.number("step")):
        parts.append(_numbers(job, losses))
    else:
        parts.append(Text("No step is complete yet."))
    parts.append(ranks_panel(job))
    if job.sentences:
        said = [f"{duration(now - when)} ago: {what}" for when, what in job.sentences[-MOST_SENTENCES:]]
        parts.append(Panel(Text("\n".join(said)), title="what was said", title_align="left"))
    return Group(*parts)


def ranks_panel(job: JobNow) -> RenderableType:
    """Each rank's step and what it is doing now; slow and silent ones are marked."""
    table = Table.grid(padding=(0, 2))
    longest = max((one.own for one in job.ranks if math.isfinite(one.own)), default=math.nan)
    several_hosts = len({one.host for one in job.ranks}) > 1
    for one in job.ranks[:MOST_RANKS]:
        said, colour = _remark(one)
        table.add_row(
            Text(f"rank {one.rank}{f' on {one.host}' if several_hosts else ''}"),
            Text(f"step {whole(one.steps)}"),
            Text(one.ended or one.part or "?"),
            duration(one.own) if one.own > 0 else "",
            Text(bar(one.own / longest, 20) if longest > 0 else "", colour),
            Text(said, colour),
        )
    if len(job.ranks) > MOST_RANKS:
        table.add_row(f"{len(job.ranks) - MOST_RANKS} more")
    if not job.ranks:
        table.add_row("No rank has made an Accelerator yet.")
    return Panel(table, title="ranks now: step, part of it, own seconds of a step", title_align="left")


def stacks_panel(stacks: Sequence[RankStack]) -> RenderableType:
    """Ranks with the same stack together; of each the innermost calls."""
    parts: list[RenderableType] = []
    for ranks, one in together(stacks):
        parts.append(Text(f"{ranks}, {one.place}", "bold"))
        parts.append(Text("\n".join(one.stack.splitlines()[-STACK_LINES:])))
    return Panel(Group(*parts), title="stacks, innermost call last", title_align="left")


def stacks_text(stacks: Sequence[RankStack]) -> str:
    """All of them in full."""
    return "\n".join(f"{ranks}, {one.place}\n{one.stack}\n" for ranks, one in together(stacks))


def together(stacks: Sequence[RankStack]) -> list[tuple[str, RankStack]]:
    """(ranks in words, the stack that they share)."""
    same: dict[str, list[RankStack]] = {}
    for one in sorted(stacks, key=lambda stack: stack.rank):
        same.setdefault(one.stack, []).append(one)
    return [
        (f"rank{'s' if len(ones) > 1 else ''} {', '.join(str(one.rank) for one in ones)}", ones[0])
        for ones in same.values()
    ]


def keys_line(notice: str) -> RenderableType:
    """What the keys do, and below it what came of the last one."""
    keys = Text("  ").join(Text.assemble((key, "reverse"), f" {what}") for key, what in KEYS)
    return Group(keys, Text(notice, "bold")) if notice else keys


def _numbers(job: JobNow, losses: Sequence[float]) -> Table:
    table = Table.grid(padding=(0, 2))
    total, seconds = job.number("total_steps"), job.number("step_seconds")
    of_all = f" of {whole(total)}" if math.isfinite(total) else ""
    left = max(total - job.number("step"), 0.0) * seconds
    epoch = f", epoch {whole(job.number('epoch'))}" if math.isfinite(job.number("epoch")) else ""
    table.add_row(
        "step",
        f"{whole(job.number('step'))}{of_all}{epoch}",
        f"{duration(left)} left" if math.isfinite(left) else "",
    )
    if "loss" in job.latest:
        table.add_row("loss", digits(job.number("loss"), 4), sparkline(losses))
    table.add_row("seconds a step", digits(seconds, 4), "")
    rates = [
        f"{short(job.number(f'{unit}_per_second'))} {unit}/s"
        for unit in ("tokens", "samples")
        if math.isfinite(job.number(f"{unit}_per_second"))
    ]
    if math.isfinite(job.number("mfu")):
        rates.append(f"MFU {percent(job.number('mfu'))}")
    if rates:
        table.add_row("throughput", ", ".join(rates), "")
    return table


def _remark(one: RankNow) -> tuple[str, str]:
    """What is worth saying of a rank, and its colour."""
    if one.ended:
        return "", "blue"
    if one.silent >= STILL_S:
        return f"silent for {duration(one.silent)}", "red"
    if one.still >= STILL_S:
        return f"nothing done for {duration(one.still)}", "red"
    return ("slow", "red") if one.is_slow else ("", "green")
