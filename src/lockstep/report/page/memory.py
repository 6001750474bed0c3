"""Memory: over the run, over one step, and beside what the formulas say."""

from __future__ import annotations

import numpy as np

from lockstep.history.columns import MEMORY, bounded
from lockstep.history.events import RunEvent, named
from lockstep.history.read import RunHistory
from lockstep.report.draw.charts import PlotLine, line_chart, stacked_chart
from lockstep.report.draw.html import columns, paragraph, section, table
from lockstep.report.numbers import RunNumbers
from lockstep.words import bytes_text, digits, duration, plain_text

COLOURS = {"weights": 0, "gradients": 1, "optimizer": 2, "activations": 3, "other": 9}


def memory(run: RunHistory, numbers: RunNumbers) -> str:
    charts = [_over_run(run), *(_over_step(event) for event in named(run.events, "memory")[-1:])]
    compared = expected(numbers)
    if not any((*charts, compared)):
        return section("Memory", paragraph("Memory was not measured in this run."))
    return section("Memory", columns(*(one for one in charts if one)), compared)


def _over_run(run: RunHistory) -> str:
    steps = run.steps
    count = len(steps)
    curves = [
        (name, steps.memory[name].filled_forward(count)[steps.kept])
        for name in MEMORY
        if name in steps.memory
    ]
    whole = "activations" in steps.memory
    known = [
        (name if whole or name != "other" else "other, with activations", values, COLOURS[name])
        for name, values in curves
        if np.isfinite(values).any()
    ]
    at = steps.step[steps.kept]
    if known:
        return stacked_chart("At the peak of a step", at, known, "bytes", note="rank 0")
    if "peak" in steps.memory:
        line = PlotLine("peak", at, steps.memory["peak"].filled_forward(count)[steps.kept])
        return line_chart("Peak of a step", [line], "bytes", from_zero=True, note="rank 0")
    return ""


def _over_step(event: RunEvent) -> str:
    rows = [one for one in event.items("points") if type(one) is list and len(one) >= 2]
    points = [(bounded(one[0]), bounded(one[1]), one[2] if len(one) > 2 else "") for one in rows]
    points = [one for one in points if np.isfinite(one[0]) and np.isfinite(one[1])]
    if len(points) < 2:
        return ""
    points.sort(key=lambda one: one[0])
    x, y = (np.array([one[place] for one in points], dtype=float) for place in (0, 1))
    at = f"step {event.step:.0f}" if np.isfinite(event.step) else ""
    highest = points[int(y.argmax())]
    label = f" at {plain_text(highest[2], 80)}" if highest[2] else ""
    sentence = f"Highest: {bytes_text(highest[1])} after {duration(highest[0])}{label}."
    chart = line_chart(
        "Over one step",
        [PlotLine("memory", x, y, colour=3)],
        "bytes",
        from_zero=True,
        x_kind="seconds",
        x_title="time",
        note=at,
        smooth=False,
    )
    return f"<div>{chart}{paragraph(sentence, 'quiet')}</div>"


def expected(numbers: RunNumbers) -> str:
    """What the formulas say beside what was measured; empty where none is at hand."""
    if not numbers.memory_expected:
        return ""
    rows = []
    for name, by_formula in numbers.memory_expected.items():
        measured = numbers.memory.get(name)
        rows.append(
            (
                name,
                bytes_text(by_formula),
                bytes_text(measured) if measured is not None else "not measured",
                digits(measured / by_formula) if measured is not None and by_formula > 0 else "",
            )
        )
    titles = ("on rank 0", "by the formula", "measured", "ratio")
    return f"<h3>Expected and measured</h3>{table(titles, rows, right=titles[1:])}"
