"""The document of several runs beside each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from lockstep.history.columns import MEMORY
from lockstep.history.read import RunHistory
from lockstep.report.compare import comparison_sentences, distances, settings_that_differ
from lockstep.report.draw.charts import UNLIKE, PlotLine, bars, line_chart
from lockstep.report.draw.html import columns, legend, long_table, paragraph, safe, section, table
from lockstep.report.numbers import RunNumbers
from lockstep.report.page.curves import rate_of, throughput_chart
from lockstep.report.page.document import answer, document
from lockstep.report.page.memory import COLOURS
from lockstep.report.page.step_time import share_bar
from lockstep.report.page.timeline import picture
from lockstep.report.summary import why_it_stopped
from lockstep.words import bytes_text, date, digits, duration, percent, short, whole

Figure = Callable[[RunNumbers], str]


def _or_unknown(value: float, text: Callable[[float], str]) -> str:
    return text(value) if math.isfinite(value) else ""


FIGURES: dict[str, Figure] = {
    "ended": lambda one: one.status.value,
    "ranks": lambda one: ", ".join(str(size) for size in one.world_sizes[-4:]),
    "steps": lambda one: whole(one.steps),
    "loss at the end": lambda one: digits(one.loss.last, 5) if one.loss else "",
    "lowest loss": lambda one: digits(one.loss.least, 5) if one.loss else "",
    "a step": lambda one: duration(one.step_times.median) if one.step_times else "",
    "samples/s": lambda one: _or_unknown(one.samples_per_second, short),
    "tokens/s": lambda one: _or_unknown(one.tokens_per_second, short),
    "MFU": lambda one: _or_unknown(one.peak_share, percent),
    "goodput": lambda one: _or_unknown(one.goodput.share, percent) if one.goodput else "",
    "on the clock": lambda one: duration(one.goodput.total) if one.goodput else "",
    "peak memory": lambda one: bytes_text(one.memory["peak"]) if "peak" in one.memory else "",
    "sent in a step": lambda one: bytes_text(sum(one.bytes_per_step.values())) if one.bytes_per_step else "",
    "starts": lambda one: whole(len(one.attempts)),
    "spikes": lambda one: whole(len(one.spikes)),
}


def comparison_page(
    runs: Sequence[RunHistory], numbers: Sequence[RunNumbers], names: Sequence[str], now: float
) -> str:
    """``names`` tell the runs apart; ``now``: when the page is made, in seconds since 1970."""
    title = ", ".join(names)
    ended = [f"{name}: {why_it_stopped(one)}" for name, one in zip(names, numbers, strict=True)]
    top = [
        f"<h1>{safe(title)}</h1>",
        paragraph(f"{len(runs)} runs beside each other. Page of {date(now)}.", "quiet"),
        answer(
            [
                ("What differs", comparison_sentences(runs, names)),
                ("How they ended", ended),
            ],
            False,
        ),
    ]
    rows = [(title, *(figure(one) for one in numbers)) for title, figure in FIGURES.items()]
    sections = [
        section("Figures", table(("", *names), [row for row in rows if any(row[1:])], right=names)),
        _curves(runs, names),
        _step_times(numbers, names),
        _memory(numbers, names),
        _settings(runs, names),
        section(
            "On the clock",
            *(
                f"<h3>{safe(name)}</h3>{picture(one, run)}"
                for name, one, run in zip(names, numbers, runs, strict=True)
            ),
        ),
        paragraph("lockstep report RUN shows one of them in full.", "quiet"),
    ]
    return document(title, top, sections)


def _curves(runs: Sequence[RunHistory], names: Sequence[str]) -> str:
    charts = [
        _overlay(runs, names, "Loss", "loss", may_log=True),
        _overlay(runs, names, "Loss by time", "loss", may_log=True, by_time=True),
        _overlay(runs, names, "Gradient norm", "gradient_norm", may_log=True),
        _overlay(runs, names, "Learning rate", "learning_rate"),
    ]
    rates = [rate_of(run) for run in runs]
    whats = {what for _, _, what in rates}
    if len(whats) == 1:
        series = [
            (name, run.steps.step[run.steps.kept], brought, seconds)
            for name, run, (brought, seconds, _) in zip(names, runs, rates, strict=True)
        ]
        charts.append(throughput_chart(series, whats.pop()))
    charts.append(_distances(runs, names))
    return section("Curves", columns(*(one for one in charts if one)))


def _overlay(
    runs: Sequence[RunHistory],
    names: Sequence[str],
    title: str,
    quantity: str,
    may_log: bool = False,
    by_time: bool = False,
) -> str:
    lines = []
    for colour, run, name in zip(UNLIKE, runs, names, strict=False):
        values = getattr(run.steps, quantity)
        rows = run.steps.kept & np.isfinite(values)
        at = run.steps.step[rows]
        if by_time:
            rows &= np.isfinite(run.steps.time)
            at = run.steps.time[rows]
            # A clock may be set back, but the axis has to ascend.
            at = np.maximum.accumulate(at - at[0]) if len(at) else at
        if rows.any():
            lines.append(PlotLine(name, at, values[rows], colour))
    if not lines:
        return ""
    x_kind, x_title = ("seconds", "time") if by_time else ("count", "step")
    return line_chart(title, lines, may_log=may_log, x_kind=x_kind, x_title=x_title)


def _distances(runs: Sequence[RunHistory], names: Sequence[str]) -> str:
    lines = []
    for colour, run, name in zip(UNLIKE[1:], runs[1:], names[1:], strict=False):
        steps, far = distances(runs[0], run)
        known = np.isfinite(far) & (far > 0)
        if known.any():
            lines.append(PlotLine(name, steps[known], far[known], colour))
    note = f"from {names[0]}, in parts of it"
    return line_chart("Distance of the losses", lines, may_log=True, note=note) if lines else ""


def _step_times(numbers: Sequence[RunNumbers], names: Sequence[str]) -> str:
    rows = [
        (name, one.step_times) for name, one in zip(names, numbers, strict=True) if one.step_times is not None
    ]
    rows = [(name, times) for name, times in rows if times.shares]
    return section("Where a step's time goes", share_bar(rows)) if rows else ""


def _memory(numbers: Sequence[RunNumbers], names: Sequence[str]) -> str:
    rows = [
        (
            name,
            [
                (f"{kind}: {bytes_text(one.memory[kind])}", one.memory[kind], COLOURS[kind])
                for kind in MEMORY
                if kind in one.memory
            ],
            bytes_text(one.memory["peak"]),
        )
        for name, one in zip(names, numbers, strict=True)
        if "peak" in one.memory
    ]
    if not any(pieces for _, pieces, _ in rows):
        return ""
    return section(
        "Memory at the peak",
        bars(rows),
        legend((f"f{COLOURS[kind]}", kind) for kind in MEMORY if any(kind in one.memory for one in numbers)),
    )


def _settings(runs: Sequence[RunHistory], names: Sequence[str]) -> str:
    rows = [
        (one.name, *(f"{value} ({source})" if source else value or "not set" for value, source in one.values))
        for one in settings_that_differ(runs)
    ]
    title = "What was set differently"
    if not rows:
        return section(title, paragraph("Nothing that was written."))
    return section(title, long_table(("", *names), rows, "entries"))
