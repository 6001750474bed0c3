"""A run on one screen, as it goes on: how it stands, its latest steps, its ranks, what happened last.

What a run's files say may hold anything. Nothing is taken for markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lockstep.history.attempts import RunStatus
from lockstep.history.read import RunHistory
from lockstep.report.numbers import RunNumbers, numbers_of
from lockstep.words import bytes_text, count, digits, duration, percent, plain_text, short, whole

NEWEST_BYTES = 1 << 18
"""Of steps that are read for a screen: some hundreds."""
SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE = 48
BAR = 30
"""Characters."""
MOST_RANKS = 32
MOST_LINES = 6
"""Of what happened."""
COLOURS = {RunStatus.RUNNING: "green", RunStatus.FINISHED: "blue", RunStatus.STOPPED: "blue"}
"""Of a run's status; any other is red."""
IN_PLAIN_VIEW = {"start", "peak", "total"}
"""Events that are no news."""
QUANTITIES = {
    "loss": "loss",
    "gradient_norm": "gradient norm",
    "learning_rate": "learning rate",
    "step_seconds": "seconds a step",
}


def screen(run: RunHistory, now: float) -> RenderableType:
    """Show the folder of a run. ``now``: seconds since 1970."""
    numbers = numbers_of(run, now)
    parts: list[RenderableType] = [_title(run, numbers, now)]
    if run.has_steps:
        times, steps = numbers.step_times, run.steps
        values = {
            "step": numbers.last_step,
            "total_steps": numbers.total_steps,
            "left_s": numbers.seconds_left,
            "epoch": numbers.epoch,
            "tokens_per_second": numbers.tokens_per_second,
            "samples_per_second": numbers.samples_per_second,
            "mfu": numbers.peak_share,
            "peak_bytes": numbers.peak_memory,
        }
        curves = {name: getattr(steps, name) for name in ("loss", "gradient_norm", "learning_rate")}
        known = {
            name: curve[np.isfinite(curve)] for name, curve in {**curves, "step_seconds": steps.total}.items()
        }
        values |= {name: float(curve[-1]) for name, curve in known.items() if len(curve)}
        shares = sorted((times.shares if times else {}).items(), key=lambda item: -item[1])
        rows = [(part, percent(share), Text(bar(share), "cyan")) for part, share in shares if share > 0]
        parts += [_newest(values, {**curves, "step_seconds": steps.total}), _panel("a step's time", rows)]
        if len(numbers.rank_seconds) > 1:
            parts.append(_ranks(numbers))
    else:
        parts.append(Text("No step is complete yet."))
    if lines := _events(run, now):
        parts.append(Panel(Text("\n".join(lines)), title="what happened", title_align="left"))
    return Group(*parts)


def sparkline(values: Iterable[float], width: int = SPARKLINE) -> str:
    """Draw the newest values as blocks between their least and their greatest; what is no number is a space."""
    newest = list(values)[-width:]
    finite = [value for value in newest if math.isfinite(value)]
    least, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    scaled = [(value - least) / span if span > 0 else value * 0.0 for value in newest]
    return "".join(SPARKS[round(one * (len(SPARKS) - 1))] if math.isfinite(one) else " " for one in scaled)


def bar(share: float, width: int = BAR) -> str:
    """Draw a bar. ``share``: 0 to 1."""
    return "█" * round(min(max(share, 0.0), 1.0) * width) if math.isfinite(share) else ""


def _title(run: RunHistory, numbers: RunNumbers, now: float) -> Text:
    status, started, ended_by = numbers.status, numbers.started, numbers.ended_by
    colour = COLOURS.get(status, "red")
    words = []
    if started is not None:
        ranks = count(numbers.world_sizes[-1], "rank") if numbers.world_sizes else ""
        words += [ranks, started.text("parallel"), started.text("device")]
    if math.isfinite(numbers.first_time):
        words.append(
            duration((now if status is RunStatus.RUNNING else numbers.last_time) - numbers.first_time)
        )
    if len(numbers.attempts) > 1:
        words.append(f"start {len(numbers.attempts)}")
    text = Text.assemble(
        (run.name, "bold"), "  ", (status.value, colour), *(f"  {word}" for word in words if word)
    )
    if ended_by is not None and ended_by.sentence:
        text.append(f"\n{plain_text(ended_by.sentence, 300)}", colour)
    return text


def _newest(values: Mapping[str, float], curves: Mapping[str, Iterable[float]]) -> Table:
    """Show the newest values by name, those of ``QUANTITIES`` with a curve."""

    def told(name: str, form: str) -> str:
        value = values.get(name, math.nan)
        return form.format(whole(value)) if math.isfinite(value) else ""

    left, peak, mfu = (values.get(name, math.nan) for name in ("left_s", "peak_bytes", "mfu"))
    rates = [(values.get(f"{unit}_per_second", math.nan), unit) for unit in ("tokens", "samples")]
    throughput = [f"{short(rate)} {unit}/s" for rate, unit in rates if math.isfinite(rate)]
    rows = {
        "step": whole(values["step"]) + told("total_steps", " of {}") + told("epoch", ", epoch {}"),
        **{title: digits(values[name], 4) for name, title in QUANTITIES.items() if name in values},
        "throughput": ", ".join([*throughput, *([f"MFU {percent(mfu)}"] if math.isfinite(mfu) else [])]),
        "memory, peak": f"{bytes_text(peak)} on rank 0" if math.isfinite(peak) else "",
    }
    beside = {title: sparkline(curves[name]) for name, title in QUANTITIES.items() if name in curves}
    beside["step"] = f"{duration(left)} left" if math.isfinite(left) else ""
    return _grid((title, text, beside.get(title, "")) for title, text in rows.items() if text)


def _ranks(numbers: RunNumbers) -> Panel:
    """Show each rank's own seconds of a step, the slow ones first."""
    seconds, slow = numbers.rank_seconds, numbers.slow_ranks
    longest = max((one for one in seconds if one > 0), default=math.nan)
    order = sorted(range(len(seconds)), key=lambda rank: (rank not in slow, rank))
    rows: list[Sequence[str | Text]] = [
        (
            f"rank {rank}",
            duration(seconds[rank]) if seconds[rank] > 0 else "",
            Text(bar(seconds[rank] / longest), "red" if rank in slow else "green"),
            Text(f"slow: {digits(slow[rank])} times the median" if rank in slow else "", "red"),
        )
        for rank in order[:MOST_RANKS]
    ]
    if len(order) > MOST_RANKS:
        rows.append([f"{len(order) - MOST_RANKS} more"])
    return _panel("ranks: own seconds of a step", rows)


def _events(run: RunHistory, now: float) -> list[str]:
    lines = []
    for event in [event for event in run.events if event.name not in IN_PLAIN_VIEW][-MOST_LINES:]:
        ago = f"{duration(now - event.time)} ago" if math.isfinite(event.time) else "?"
        step = f", step {whole(event.step)}" if math.isfinite(event.step) else ""
        what = event.sentence or event.text("path").removeprefix(f"{run.path.resolve().parent}/")
        lines.append(
            f"{ago}{step}: {plain_text(event.name, 40)}{f': {plain_text(what, 200)}' if what else ''}"
        )
    return lines


def _panel(title: str, rows: Iterable[Sequence[str | Text]]) -> Panel:
    return Panel(_grid(rows), title=title, title_align="left")


def _grid(rows: Iterable[Sequence[str | Text]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
