"""What the run computed and how fast: a chart for each quantity, over optimizer steps."""

from __future__ import annotations

import numpy as np

from lockstep.history.columns import FloatArray, SparseColumn
from lockstep.history.read import RunHistory
from lockstep.report.draw.charts import UNLIKE, PlotLine, line_chart
from lockstep.report.draw.html import columns, paragraph, section
from lockstep.report.numbers import RunNumbers
from lockstep.words import plain_text

MOST_LOGGED = 8
"""Charts of what a script has logged."""


def curves(run: RunHistory, numbers: RunNumbers) -> str:
    steps, kept = run.steps, run.steps.kept
    if not run.has_steps:
        return section(
            "Curves", paragraph("No step was written yet: the curves begin with the first optimizer step.")
        )
    brought, seconds, what = rate_of(run)
    spikes = [event.step for event in numbers.spikes if np.isfinite(event.step)]
    charts = [
        _chart(run, "Loss", "loss", spikes, may_log=True),
        _chart(run, "Gradient norm", "gradient_norm", spikes, may_log=True),
        _chart(run, "Learning rate", "learning_rate", []),
        throughput_chart([("", steps.step[kept], brought, seconds)], what),
    ]
    charts += [_logged(run, name, column) for name, column in list(steps.logged.items())[:MOST_LOGGED]]
    notes = []
    if len(steps.logged) > MOST_LOGGED:
        notes.append(f"{len(steps.logged) - MOST_LOGGED} more logged quantities are not drawn.")
    if numbers.loss is None:
        notes.append("The loss is not known: accelerator.backward(loss) tells it.")
    if numbers.again:
        notes.append("What was done again after going back is drawn pale.")
    return section(
        "Curves", columns(*(one for one in charts if one)), *(paragraph(one, "quiet") for one in notes)
    )


def _chart(run: RunHistory, title: str, name: str, marks: list[float], may_log: bool = False) -> str:
    steps, kept = run.steps, run.steps.kept
    values: FloatArray = getattr(steps, name)
    written = steps.written.get(name, np.isfinite(values))
    rows = kept & written
    if not rows.any():
        return ""
    lines = [PlotLine(title, steps.step[rows], values[rows])]
    again = ~kept & np.isfinite(values)
    for attempt in np.unique(steps.attempt[again]):
        mine = again & (steps.attempt == attempt)
        order = np.argsort(steps.step[mine], kind="stable")
        lines.append(PlotLine(title, steps.step[mine][order], values[mine][order], colour=3, pale=True))
    note = "dotted: spikes" if marks else ""
    return line_chart(
        title, lines, may_log=may_log, marks=marks, note=note, from_zero=name == "learning_rate"
    )


def rate_of(run: RunHistory) -> tuple[FloatArray, FloatArray, str]:
    """Of the steps that count what each brought, its seconds, and the name of that: tokens, samples or steps."""
    steps, kept = run.steps, run.steps.kept
    for name, values in (("tokens", steps.tokens), ("samples", steps.samples)):
        if np.nansum(values[kept]) > 0:
            return values[kept], steps.total[kept], name
    return np.ones(int(kept.sum())), steps.total[kept], "steps"


def throughput_chart(runs: list[tuple[str, FloatArray, FloatArray, FloatArray]], what: str) -> str:
    """(name, step, what each brought, its seconds) of each run."""
    lines = []
    for colour, (name, step, brought, seconds) in zip(UNLIKE, runs, strict=False):
        known = np.isfinite(brought) & np.isfinite(seconds) & (seconds > 0)
        if known.any():
            rate = brought[known] / seconds[known]
            lines.append(PlotLine(name or f"{what}/s", step[known], rate, colour, extremes=len(runs) == 1))
    return line_chart("Throughput", lines, "count", from_zero=True, note=f"{what}/s") if lines else ""


def _logged(run: RunHistory, name: str, column: SparseColumn) -> str:
    rows = np.array(column.rows)
    kept = run.steps.kept[rows]
    values = np.array(column.values)[kept]
    if not np.isfinite(values).any():
        return ""
    return line_chart(
        plain_text(name, 80), [PlotLine(name, run.steps.step[rows][kept], values)], note="logged"
    )
