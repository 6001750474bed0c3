"""A run on one screen, as it goes on: how it stands, its latest steps, its ranks, what happened last.

Of a launch on this machine also its ranks as the watch sees them, their stacks, and what was said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lockstep.history.attempts import RunStatus
from lockstep.history.columns import FloatArray
from lockstep.history.read import RunHistory
from lockstep.report.job import JobNow, RankNow, RankStack
from lockstep.report.numbers import RunNumbers, numbers_of
from lockstep.words import bytes_text, digits, duration, percent, plain_text, short, whole

NEWEST_BYTES = 1 << 18
"""Of steps that are read for a screen: some hundreds."""
SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE = 48
BAR = 30
"""Characters."""
MOST_RANKS = 32
MOST_EVENTS = 6
COLOURS = {RunStatus.RUNNING: "green", RunStatus.FINISHED: "blue", RunStatus.STOPPED: "blue"}
"""Of a run's status; any other is red."""
IN_PLAIN_VIEW = {"start", "peak", "memory", "total"}
"""Events that are no news."""


def screen(run: RunHistory, now: float, ranks: RenderableType | None = None) -> RenderableType:
    """``now``: seconds since 1970. ``ranks``: what is known of them from elsewhere, in place of what the folder says.

    Nothing in it is taken for markup.
    """
    numbers = numbers_of(run, now)
    parts: list[RenderableType] = [_title(run, numbers, now)]
    if run.has_steps:
        parts += [_steps(run, numbers), Panel(_parts(numbers), title="a step's time", title_align="left")]
        if ranks is None and len(numbers.rank_seconds) > 1:
            parts.append(Panel(_ranks(numbers), title="ranks: own seconds of a step", title_align="left"))
    else:
        parts.append(Text("No step is complete yet."))
    if ranks is not None:
        parts.append(ranks)
    if happened := _events(run, now):
        parts.append(Panel(Text("\n".join(happened)), title="what happened", title_align="left"))
    return Group(*parts)


def sparkline(values: Sequence[float], width: int = SPARKLINE) -> str:
    """The newest values as blocks between their least and their greatest; a value that is no number is a space."""
    newest = list(values)[-width:]
    finite = [value for value in newest if math.isfinite(value)]
    least, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)

    def spark(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return SPARKS[round((value - least) / span * (len(SPARKS) - 1))] if span > 0 else SPARKS[0]

    return "".join(map(spark, newest))


def bar(share: float, width: int = BAR) -> str:
    """``share``: 0 to 1."""
    return "█" * round(min(max(share, 0.0), 1.0) * width) if math.isfinite(share) else ""


def _title(run: RunHistory, numbers: RunNumbers, now: float) -> Text:
    status, started = numbers.status, numbers.started
    text = Text.assemble((run.name, "bold"), "  ", (status.value, COLOURS.get(status, "red")))
    if started is not None:
        device, parallel = started.text("device"), started.text("parallel")
        ranks = f"{whole(started.number('world_size'))} ranks" if numbers.world_sizes else ""
        text.append("".join(f"  {word}" for word in (ranks, parallel, device) if word))
    if math.isfinite(numbers.first_time):
        end = now if status is RunStatus.RUNNING else numbers.last_time
        text.append(f"  {duration(end - numbers.first_time)}")
    if len(numbers.attempts) > 1:
        text.append(f"  start {len(numbers.attempts)}")
    if numbers.ended_by is not None and numbers.ended_by.sentence:
        text.append(f"\n{plain_text(numbers.ended_by.sentence, 300)}", COLOURS.get(status, "red"))
    return text


def _steps(run: RunHistory, numbers: RunNumbers) -> Table:
    steps, table = run.steps, Table.grid(padding=(0, 2))
    left = f"{duration(numbers.seconds_left)} left" if math.isfinite(numbers.seconds_left) else ""
    table.add_row("step", Text(f"{whole(numbers.last_step)}{_of_all(numbers)}{_epoch(numbers)}"), Text(left))
    for title, values in (
        ("loss", steps.loss),
        ("gradient norm", steps.gradient_norm),
        ("learning rate", steps.learning_rate),
        ("seconds a step", steps.total),
    ):
        if np.isfinite(values).any():
            table.add_row(title, Text(digits(_last(values), 4)), Text(sparkline(values.tolist())))
    rates = [
        f"{short(rate)} {unit}/s"
        for rate, unit in ((numbers.tokens_per_second, "tokens"), (numbers.samples_per_second, "samples"))
        if math.isfinite(rate)
    ]
    if math.isfinite(numbers.peak_share):
        rates.append(f"MFU {percent(numbers.peak_share)}")
    if rates:
        table.add_row("throughput", Text(", ".join(rates)), "")
    if math.isfinite(peak := numbers.memory.get("peak", math.nan)):
        table.add_row("memory, peak", Text(f"{bytes_text(peak)} on rank 0"), "")
    return table


def _of_all(numbers: RunNumbers) -> str:
    return f" of {whole(numbers.total_steps)}" if math.isfinite(numbers.total_steps) else ""


def _epoch(numbers: RunNumbers) -> str:
    return f", epoch {whole(numbers.epoch)}" if math.isfinite(numbers.epoch) else ""


def _last(values: FloatArray) -> float:
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else math.nan


def _parts(numbers: RunNumbers) -> Table:
    table = Table.grid(padding=(0, 2))
    shares = numbers.step_times.shares if numbers.step_times is not None else {}
    for part, share in sorted(shares.items(), key=lambda item: -item[1]):
        if share > 0:
            table.add_row(part, percent(share), Text(bar(share), "cyan"))
    return table


def _ranks(numbers: RunNumbers) -> Table:
    table = Table.grid(padding=(0, 2))
    seconds = numbers.rank_seconds
    longest = max((one for one in seconds if math.isfinite(one)), default=math.nan)
    slowest_first = sorted(range(len(seconds)), key=lambda rank: (rank not in numbers.slow_ranks, rank))
    for rank in slowest_first[:MOST_RANKS]:
        is_slow = rank in numbers.slow_ranks
        length = bar(seconds[rank] / longest) if longest > 0 else ""
        remark = f"slow: {digits(numbers.slow_ranks[rank])} times the median" if is_slow else ""
        table.add_row(
            f"rank {rank}",
            duration(seconds[rank]),
            Text(length, "red" if is_slow else "green"),
            Text(remark, "red"),
        )
    if len(seconds) > MOST_RANKS:
        table.add_row(f"{len(seconds) - MOST_RANKS} more")
    return table


def _events(run: RunHistory, now: float) -> list[str]:
    news = [event for event in run.events if event.name not in IN_PLAIN_VIEW]
    lines = []
    for event in news[-MOST_EVENTS:]:
        ago = f"{duration(now - event.time)} ago" if math.isfinite(event.time) else "?"
        step = f", step {whole(event.step)}" if math.isfinite(event.step) else ""
        what = event.sentence or event.text("path").removeprefix(f"{run.path.resolve().parent}/")
        lines.append(
            f"{ago}{step}: {plain_text(event.name, 40)}{f': {plain_text(what, 200)}' if what else ''}"
        )
    return lines


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
        lines = [f"{duration(now - when)} ago: {what}" for when, what in job.sentences[-MOST_SENTENCES:]]
        parts.append(Panel(Text("\n".join(lines)), title="what was said", title_align="left"))
    return Group(*parts)


def ranks_panel(job: JobNow) -> RenderableType:
    """Each rank's step and what it is doing now; slow and silent ones are marked."""
    table = Table.grid(padding=(0, 2))
    longest = max((one.own for one in job.ranks if math.isfinite(one.own)), default=math.nan)
    several_hosts = len({one.host for one in job.ranks}) > 1
    for one in job.ranks[:MOST_RANKS]:
        remark, colour = _remark(one)
        table.add_row(
            Text(f"rank {one.rank}{f' on {one.host}' if several_hosts else ''}"),
            Text(f"step {whole(one.steps)}"),
            Text(one.ended or one.part or "?"),
            duration(one.own) if one.own > 0 else "",
            Text(bar(one.own / longest, 20) if longest > 0 else "", colour),
            Text(remark, colour),
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
