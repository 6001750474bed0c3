"""Charts: a title, axes with words, curves or stacked areas, what the colours mean."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.history.columns import FloatArray, IndexArray
from lockstep.report.draw import svg
from lockstep.report.draw.html import legend, safe
from lockstep.report.draw.scale import Scale, scale_of, span_of


def buckets(x: FloatArray, count: int) -> IndexArray:
    """The first index of each of at most ``count`` parts of equal length on the axis, and the number of points.

    ``x`` ascends. Parts without a point are left out.
    """
    if not len(x):
        return np.zeros(1, dtype=np.int64)
    edges = np.linspace(x[0], x[-1], count + 1)[:-1]
    # A part without points begins where the next one does, and drops out.
    starts = np.unique(np.searchsorted(x, edges, side="left"))
    return np.append(starts[starts < len(x)], len(x))


def thinned(x: FloatArray, y: FloatArray, count: int) -> tuple[FloatArray, FloatArray]:
    """At most 2 * ``count`` of the points: the least and the greatest ``y`` of each part of the axis, and the ends.

    ``x`` ascends; points without a number must have been dropped.
    """
    if len(x) <= 2 * count:
        return x, y
    bounds = buckets(x, count)
    keep = [0, len(x) - 1]
    for start, end in itertools.pairwise(bounds):
        part = y[start:end]
        keep += [start + int(part.argmin()), start + int(part.argmax())]
    chosen = np.unique(np.array(keep))
    return x[chosen], y[chosen]


def means(x: FloatArray, y: FloatArray, count: int) -> tuple[FloatArray, FloatArray]:
    """One point for each part of the axis: the mean of its points that are numbers."""
    bounds = buckets(x, count)[:-1]
    known = np.isfinite(y)
    counts = np.add.reduceat(known.astype(float), bounds) if len(x) else np.zeros(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        centres = np.add.reduceat(np.where(known, x, 0.0), bounds) / counts if len(x) else counts
        values = np.add.reduceat(np.where(known, y, 0.0), bounds) / counts if len(x) else counts
    there = counts > 0
    return centres[there], values[there]


POINTS = 600
"""Parts of the axis of which each keeps its least and greatest value, for all curves of a chart together."""
SMOOTH_FROM = 400
"""Longer curves are drawn pale, with their mean over ``MEANS`` parts of the axis upon them."""
MEANS = 160
BANDS = 160
"""Columns of a stacked chart."""
UNLIKE = (0, 3, 2, 5, 4, 6, 7, 8)
"""Colours of several curves, the most unlike first."""
LAST = 0.93
"""Words at places beyond it are set to the left of their place."""


@dataclass(frozen=True)
class PlotLine:
    """One curve: ``x`` ascends. ``colour``: a number. ``pale``: thin, and not named when it is pointed at.
    ``extremes``: if it has more points than can be told apart, the least and greatest of them are drawn beside their
    means."""

    name: str
    x: FloatArray
    y: FloatArray
    colour: int = 0
    pale: bool = False
    extremes: bool = True


def line_chart(
    title: str,
    lines: Sequence[PlotLine],
    kind: str = "number",
    *,
    from_zero: bool = False,
    may_log: bool = False,
    x_kind: str = "count",
    x_title: str = "step",
    marks: Sequence[float] = (),
    note: str = "",
    smooth: bool = True,
) -> str:
    """Curves over one axis. ``marks``: values of x with an upright line each. ``kind``, ``x_kind``: keys of ``LABELS``.

    Values that are no finite number are marked at the foot.
    """
    every_y = np.concatenate([one.y for one in lines])
    x = span_of(np.concatenate([one.x for one in lines]), x_kind)
    y = scale_of(every_y, kind, from_zero, may_log)
    count = max(POINTS // max(sum(not one.pale for one in lines), 1), 80)
    drawn = "".join(_curve(one, x, y, count, smooth) for one in lines)
    broken = np.concatenate([one.x[~np.isfinite(one.y)] for one in lines])
    drawn += _foot(x.places(np.unique(broken))) if len(broken) else ""
    drawn += svg.upright([x.place(mark) for mark in marks[:200]], "mark")
    named = [(f"f{one.colour}", one.name) for one in lines if not one.pale]
    notes = ["log scale" if y.log else "", note]
    return _figure(
        title,
        drawn,
        x,
        y,
        x_title,
        ", ".join(one for one in notes if one),
        legend(named) if len(named) > 1 else "",
    )


def _curve(one: PlotLine, x: Scale, y: Scale, count: int, smooth: bool) -> str:
    known = np.isfinite(one.y)
    at, values = one.x[known], one.y[known]
    if one.pale:
        return svg.path(_line(*thinned(at, values, count // 2), x, y), f"line s{one.colour} pale")
    if not smooth or len(at) <= SMOOTH_FROM:
        shown = (one.x, one.y) if len(one.x) <= SMOOTH_FROM else thinned(at, values, count)
        return svg.path(_line(*shown, x, y), f"line s{one.colour}", safe(one.name, 60))
    extremes = _line(*thinned(at, values, count), x, y) if one.extremes else ""
    middle = _line(*means(at, values, MEANS), x, y)
    return svg.path(extremes, f"line s{one.colour} pale") + svg.path(
        middle, f"line s{one.colour}", safe(one.name, 60)
    )


def _line(at: FloatArray, values: FloatArray, x: Scale, y: Scale) -> str:
    return svg.line(x.places(at), np.where(np.isfinite(values), y.places(values), np.nan))


def _foot(places: FloatArray) -> str:
    """Marks at the foot of a chart."""
    rounded = np.unique(np.rint(places * 500) / 500)
    marks = "".join(f"M{round(place * svg.WIDTH)} {svg.HEIGHT}v-120" for place in rounded)
    return svg.path(marks, "broken")


def stacked_chart(
    title: str,
    x_values: FloatArray,
    bands: Sequence[tuple[str, FloatArray, int]],
    kind: str,
    *,
    x_kind: str = "count",
    x_title: str = "step",
    note: str = "",
) -> str:
    """(name, values, colour) of each band, the lowest first; each point is the mean of a part of the axis."""
    points = np.zeros(0)
    tops: list[tuple[str, FloatArray, int]] = []
    top: FloatArray | None = None
    for name, values, colour in bands:
        # NaN counts as nothing, so that all bands have the same points.
        points, mean = means(x_values, np.nan_to_num(values), BANDS)
        top = mean if top is None else top + mean
        tops.append((name, top, colour))
    assert top is not None
    x, y = span_of(points, x_kind), scale_of(top, kind, from_zero=True)
    drawn = "".join(
        svg.path(svg.area(x.places(points), y.places(values)), f"band f{colour}", safe(name, 60))
        for name, values, colour in reversed(tops)
    )
    names = [(f"f{colour}", name) for name, _, colour in reversed(tops)]
    return _figure(title, drawn, x, y, x_title, note, legend(names), stacked=True)


def _figure(
    title: str, drawn: str, x: Scale, y: Scale, x_title: str, note: str, below: str, stacked: bool = False
) -> str:
    across, down = x.ticks(), y.ticks()
    inner = svg.grid([place for place, _ in across], [place for place, _ in down]) + drawn
    # Areas would cover lines that are drawn before.
    if stacked:
        inner = drawn + svg.grid([place for place, _ in across], [place for place, _ in down])
    label = safe(f"{title} by {x_title}", 200)
    data = f'data-x="{x.low!r} {x.high!r} {x.kind} 0" data-y="{y.low!r} {y.high!r} {y.kind} {int(y.log)}"'
    note_html = f" <small>{safe(note, 200)}</small>" if note else ""
    return (
        f'<figure class="chart" {data} data-t="{safe(x_title, 40)}"{" data-s" if stacked else ""}>'
        f"<figcaption>{safe(title, 100)}{note_html}</figcaption>"
        f'<div class="plot"><div class="y">{tick_labels(down, "bottom")}</div>'
        f'<div class="area">{svg.drawing(inner, label)}<b></b><output></output></div>'
        f'<div class="x">{tick_labels(across, "left")}</div></div>{below}</figure>'
    )


def tick_labels(ticks: Sequence[tuple[float, str]], side: str) -> str:
    # The last one ends where the chart does, so that it does not stand out of a narrow page.
    ends = [' class="e"' if side == "left" and place > LAST else "" for place, _ in ticks]
    return "".join(
        f'<span{end} style="{side}:{place * 100:.2f}%">{safe(text)}</span>'
        for (place, text), end in zip(ticks, ends, strict=True)
    )


def bars(
    rows: Sequence[tuple[str, Sequence[tuple[str, float, int]], str]], whole: float | None = None
) -> str:
    """(title, [(name, value, colour), ...], text) of each bar, which lies on its side; all have one scale.

    ``whole``: the length of the axis; None: of the longest bar.
    """
    longest = whole or max((sum(value for _, value, _ in pieces) for _, pieces, _ in rows), default=0.0)
    lines = []
    for title, pieces, text in rows:
        shown = "".join(
            f'<i class="f{colour}" style="width:{100 * value / longest:.2f}%" title="{safe(name, 100)}"></i>'
            for name, value, colour in pieces
            if longest > 0 and np.isfinite(value) and value > 0
        )
        lines.append(
            f'<div class="bar"><span>{safe(title, 100)}</span><span>{safe(text, 100)}</span><div>{shown}</div></div>'
        )
    return f'<div class="bars">{"".join(lines)}</div>'
