"""What the templates of a page show that they cannot work out themselves: charts, and rows of tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from lockstep.history.columns import PARTS, FloatArray
from lockstep.history.events import RunEvent, named
from lockstep.history.read import RunHistory
from lockstep.report.charts import Chart, PlotLine, Scale, line_chart, stacked_chart
from lockstep.report.numbers import RunNumbers
from lockstep.words import bytes_text, date, duration, plain_text, short, whole

MOST_LOGGED = 8
"""Charts of what a script has logged."""
MOST_MARKS = 100
PART_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "communication": "communication",
    "to_device": "copy to device",
    "data": "wait for data",
    "inference": "without gradients",
    "save": "save",
    "wait": "wait for ranks",
    "other": "other",
    "forward_backward": "forward and backward",
}
PART_COLOURS = {part: place % 10 for place, part in enumerate(PARTS)}
"""The last has the first one's: with it there is no other of the two."""
LANES = (
    ("checkpoints", ("checkpoint",), 2),
    ("restarts", ("restart", "loaded"), 0),
    ("hangs", ("hang",), 5),
    ("spikes", ("spike", "capsule"), 3),
    ("damage", ("damage",), 6),
    ("errors, stops", ("error", "stop"), 5),
)
"""Title, names of events and colour of each row of marks."""
KNOWN = {"start", "end", "peak", "total"}.union(*(names for _, names, _ in LANES))
NOT_LISTED = ("checkpoint", "peak", "total")
YES_OR_NO = {"True": "yes", "False": "no"}
OF_EVERY_EVENT = ("event", "time", "attempt", "step")


def if_known(value: float, text: Callable[[float], str] = whole) -> str:
    return text(value) if math.isfinite(value) else ""


# -- curves -------------------------------------------------------------------------------------------------


def curves(run: RunHistory, spikes: Sequence[RunEvent] = ()) -> list[Chart]:
    """Draw what the run computed and how fast, over its steps: a chart for each quantity."""
    marks = [event.step for event in spikes if math.isfinite(event.step)]
    charts = [
        _quantity("Loss", "loss", run, marks, may_log=True),
        _quantity("Gradient norm", "gradient_norm", run, marks, may_log=True),
        _quantity("Learning rate", "learning_rate", run, from_zero=True),
        _throughput(run),
        *(_logged(run, name) for name in list(run.steps.logged)[:MOST_LOGGED]),
    ]
    return [chart for chart in charts if chart is not None]


def _quantity(
    title: str,
    quantity: str,
    run: RunHistory,
    marks: Sequence[float] = (),
    may_log: bool = False,
    from_zero: bool = False,
) -> Chart | None:
    steps, values = run.steps, getattr(run.steps, quantity)
    rows = steps.kept & steps.written.get(quantity, np.isfinite(values))
    if not rows.any():
        return None
    lines = [PlotLine(title, steps.step[rows], values[rows]), *_done_again(run, values)]
    note = "dotted: spikes" if marks else ""
    return line_chart(title, lines, may_log=may_log, marks=marks, note=note, from_zero=from_zero)


def _done_again(run: RunHistory, values: FloatArray) -> Iterator[PlotLine]:
    """Yield, of each start, what was done and thrown away."""
    steps = run.steps
    again = ~steps.kept & np.isfinite(values)
    for attempt in np.unique(steps.attempt[again]):
        mine = np.flatnonzero(again & (steps.attempt == attempt))
        mine = mine[np.argsort(steps.step[mine], kind="stable")]
        yield PlotLine("", steps.step[mine], values[mine], colour=3, pale=True)


def _throughput(run: RunHistory) -> Chart | None:
    """Draw tokens in a second, or samples, or steps."""
    steps, kept = run.steps, run.steps.kept
    amounts = {"tokens": steps.tokens, "samples": steps.samples, "steps": np.ones(len(steps))}
    unit = next((unit for unit, amount in amounts.items() if np.nansum(amount[kept]) > 0), "steps")
    rows = kept & np.isfinite(amounts[unit]) & (steps.total > 0) & np.isfinite(steps.total)
    rate = amounts[unit][rows] / steps.total[rows]
    lines = [PlotLine(f"{unit}/s", steps.step[rows], rate)] if rows.any() else []
    return line_chart("Throughput", lines, "count", from_zero=True, note=f"{unit}/s")


def _logged(run: RunHistory, name: str) -> Chart | None:
    column = run.steps.logged[name]
    rows = np.array(column.rows)
    kept = run.steps.kept[rows]
    values = np.array(column.values)[kept]
    title = plain_text(name, 80)
    lines = [PlotLine(title, run.steps.step[rows][kept], values)] if np.isfinite(values).any() else []
    return line_chart(title, lines, note="logged")


# -- a step's time, and memory ------------------------------------------------------------------------------


def step_seconds(run: RunHistory, shares: Mapping[str, float]) -> Chart | None:
    """Draw the parts of a step, over the run."""
    rows = run.steps.kept & np.isfinite(run.steps.total)
    if rows.sum() < 2 or not shares:
        return None
    bands = [
        (PART_NAMES[part], run.steps.parts[part][rows], colour)
        for part, colour in PART_COLOURS.items()
        if part in shares
    ]
    return stacked_chart("Seconds of a step", run.steps.step[rows], bands, "seconds")


def memory_of_run(run: RunHistory) -> Chart | None:
    """Draw the peak of memory, over the run."""
    if "peak" not in run.steps.memory:
        return None
    kept = run.steps.kept
    values = run.steps.memory["peak"].filled_forward(len(run.steps))[kept]
    lines = [PlotLine("peak", run.steps.step[kept], values)]
    return line_chart("Peak of a step", lines, "bytes", from_zero=True, note="rank 0")


# -- on the clock -------------------------------------------------------------------------------------------


def clock(numbers: RunNumbers) -> Scale | None:
    """Return the axis from the run's first to its last sign of life; None: no time is known."""
    seconds = numbers.last_time - numbers.first_time
    return Scale(0.0, seconds, "seconds") if seconds > 0 else None


def lanes(run: RunHistory, numbers: RunNumbers, scale: Scale) -> dict[str, tuple[int, dict[float, str]]]:
    """Return by title of a row the colour of its marks, and by their places what each one says."""
    own = tuple({event.name for event in run.events} - KNOWN)
    found = {}
    for title, names, colour in (*LANES, ("the script's", own, 8)):
        # Of many, those at places of their own.
        places = {
            round(scale.place(event.time - numbers.first_time), 3): event_text(event) or event.name
            for event in named(run.events, *names)
            if math.isfinite(event.time)
        }
        if places:
            found[title] = (colour, dict(list(places.items())[:MOST_MARKS]))
    return found


def event_text(event: RunEvent) -> str:
    """Say one event in a phrase."""
    if event.name not in KNOWN:
        own = [
            f"{name}: {plain_text(value, 200)}"
            for name, value in event.fields.items()
            if name not in OF_EVERY_EVENT
        ]
        return plain_text(", ".join(own), 600)
    who = f"rank {whole(event.number('rank'))}" if math.isfinite(event.number("rank")) else ""
    ranks = f"{event.text('world_size')} ranks" if event.text("world_size") else ""
    facts = {
        "checkpoint": [
            event.text("path"),
            if_known(event.number("bytes"), bytes_text),
            if_known(event.number("seconds"), duration),
        ],
        "loaded": [event.text("path"), if_known(event.step, lambda step: f"step {whole(step)}")],
        "capsule": [event.text("path")],
        "start": [ranks, event.text("parallel")],
        "restart": [f"with {ranks}" if ranks else ""],
        "spike": [
            event.text("kind").replace("_", " "),
            f"value {event.text('value')}" if event.text("value") else "",
            event.text("action"),
            f"{len(event.items('skipped'))} batches skipped" if event.items("skipped") else "",
            f"capsule {event.text('capsule')}" if event.text("capsule") else "",
        ],
    }.get(event.name, ["" if event.sentence.lower().startswith(who) else who])
    return plain_text(", ".join(one for one in [*facts, event.sentence] if one), 600)


def event_rows(run: RunHistory, begin: float) -> list[Sequence[object]]:
    """Return what happened, in order, without the checkpoints. ``begin``: when the run did."""
    return [
        (
            if_known(event.time - begin, lambda seconds: f"+{duration(seconds)}"),
            plain_text(event.name, 60),
            event_text(event),
            if_known(event.step),
            event.attempt,
            if_known(event.time, date),
        )
        for event in run.events
        if event.name not in NOT_LISTED
    ]


# -- checkpoints, and the data ------------------------------------------------------------------------------


def checkpoint_table(run: RunHistory, events: Sequence[RunEvent]) -> tuple[list[str], list[Sequence[object]]]:
    """Return titles and rows of the checkpoints, the newest first; columns of which nothing is known are left out."""
    rows = [
        {
            "path": event.text("path"),
            "step": if_known(event.step),
            "took": if_known(event.number("seconds"), duration),
            "size": if_known(event.number("bytes"), bytes_text),
            "verified": YES_OR_NO.get(event.text("verified"), ""),
            "kept": _kept(run, event),
        }
        for event in reversed(events)
    ]
    titles = [title for title in rows[0] if any(row[title] for row in rows)] if rows else []
    return titles, [[row[title] for title in titles] for row in rows]


def _kept(run: RunHistory, event: RunEvent) -> str:
    there = run.on_disk.get(event.text("path"))
    if there is not None:
        return "on disk" if there else "removed"
    return YES_OR_NO.get(event.text("kept"), "")


def data_rows(run: RunHistory, numbers: RunNumbers) -> list[Sequence[object]]:
    """Return for each start which steps, epochs and samples it has gone through, on how many ranks."""
    steps, rows, seen = run.steps, list[Sequence[object]](), 0.0
    for attempt in numbers.attempts:
        mine = attempt.rows
        if not mine.any():
            continue
        seen += float(np.nansum(steps.samples[mine & steps.kept]))
        step, epoch = steps.step[mine], steps.epoch[mine & np.isfinite(steps.epoch)]
        tokens = steps.tokens[mine]
        rows.append(
            (
                attempt.number,
                if_known(attempt.world_size),
                f"{whole(step[0])} to {whole(step[-1])}",
                f"{whole(epoch[0])} to {whole(epoch[-1])}" if len(epoch) else "",
                short(float(np.nansum(steps.samples[mine]))),
                short(float(np.nansum(tokens))) if np.isfinite(tokens).any() else "",
                whole(int((mine & ~steps.kept).sum())),
                short(seen),
            )
        )
    return rows
