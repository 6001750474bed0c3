"""Charts: axes, and curves thinned to the paths of an SVG. ``templates/pieces.html.j2`` draws them.

The SVG is stretched to the width of the page. Its coordinates are whole numbers on a grid of ``WIDTH`` x ``HEIGHT``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.history.columns import FloatArray, IndexArray
from lockstep.words import bytes_text, digits, duration, short

WIDTH, HEIGHT = 2000, 1000
LOG_FROM = 30.0
"""A curve of positive values gets a logarithmic axis if its greatest is so many times its usual one."""
NICE = (1.0, 2.0, 2.5, 5.0, 10.0)
SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800,
           604800)  # fmt: skip
LABELS: dict[str, Callable[[float], str]] = {
    "count": short,
    "number": digits,
    "seconds": duration,
    "bytes": bytes_text,
}
"""Kind of a quantity -> how its values are written."""
POINTS = 400
"""Parts of the axis of which each keeps its least and greatest value, for all curves of a chart together."""
SMOOTH_FROM = 400
"""Longer curves are drawn pale, with their mean over ``MEANS`` parts of the axis upon them."""
MEANS = 160


@dataclass(frozen=True)
class Scale:
    """An axis from ``low`` to ``high``, both finite; ``low`` > 0 where it is ``log``. ``kind``: a key of ``LABELS``."""

    low: float
    high: float
    kind: str = "number"
    log: bool = False

    def places(self, values: FloatArray) -> FloatArray:
        """Return 0 for ``low``, 1 for ``high``; what lies outside is put on the edge."""
        low, high = self.low, self.high
        if self.log:
            values = np.log10(np.maximum(values, low))
            low, high = math.log10(low), math.log10(high)
        return np.clip((values - low) / (high - low), 0.0, 1.0)

    def place(self, value: float) -> float:
        return float(self.places(np.array([value]))[0])

    def ticks(self, count: int = 4) -> list[tuple[float, str]]:
        """Return (place, text) of about so many values that are easy to read."""
        values = self._decades(count) if self.log else self._even(count)
        return [(self.place(value), LABELS[self.kind](value)) for value in values]

    def _decades(self, count: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        steps = (1.0, 2.0, 5.0) if last - first <= 2 else (1.0,)
        powers = range(first, last + 1, max(1, math.ceil((last - first) / count)))
        values = [step * 10.0**power for power in powers for step in steps]
        return [value for value in values if self.low <= value <= self.high]

    def _even(self, count: int) -> list[float]:
        span = self.high - self.low
        power = 10.0 ** math.floor(math.log10(span / count))
        steps: list[float] = [nice * power for nice in NICE]
        if self.kind == "seconds" and span > SECONDS[0] * count:
            steps = [*SECONDS, SECONDS[-1] * 2.0 ** max(math.ceil(math.log2(span / count / SECONDS[-1])), 0)]
        # 0.999, as a step that is just enough must not fail by rounding.
        step = next(step for step in steps if step * count >= span * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def scale_of(
    values: FloatArray, kind: str, from_zero: bool = False, may_log: bool = False, margin: float = 0.05
) -> Scale:
    """Return a scale on which all finite ``values`` lie. ``margin``: room beside them, in parts of their range."""
    # Differences of greater ones overflow.
    known = values[np.abs(values) < 1e300]
    if not len(known):
        return Scale(0.0, 1.0, kind)
    low, high = float(known.min()), float(known.max())
    if may_log and low > 0 and high > LOG_FROM * float(np.median(known)):
        return Scale(low / 1.2, high * 1.2, kind, log=True)
    if from_zero and low >= 0:
        return Scale(0.0, high * 1.05 or 1.0, kind)
    if not margin:
        return Scale(low, high if high > low else low + 1.0, kind)
    room = margin * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low - room, high + room, kind)


def _buckets(x: FloatArray, count: int) -> IndexArray:
    """Return the first index of each of ``count`` parts of equal length of the axis, without parts that are empty."""
    starts = np.unique(np.searchsorted(x, np.linspace(x[0], x[-1], count + 1)[:-1]))
    return starts[starts < len(x)]


def thinned(x: FloatArray, y: FloatArray, count: int) -> tuple[FloatArray, FloatArray]:
    """Return about 2 * ``count`` points: the least and the greatest ``y`` of each part of the axis, and the ends.

    ``x`` ascends. Of longer curves, points that are no number are left out.
    """
    if len(x) <= 2 * count:
        return x, y
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    if not len(x):
        return x, y
    keep = {0, len(x) - 1}
    for start, end in itertools.pairwise([*_buckets(x, count), len(x)]):
        keep |= {start + int(y[start:end].argmin()), start + int(y[start:end].argmax())}
    chosen = np.array(sorted(keep))
    return x[chosen], y[chosen]


def means(x: FloatArray, y: FloatArray, count: int = MEANS) -> tuple[FloatArray, FloatArray]:
    """Return one point for each part of the axis: the mean of its points that are numbers."""
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    if not len(x):
        return x, y
    starts = _buckets(x, count)
    counts = np.diff([*starts, len(x)])
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts


def path(x: FloatArray, y: FloatArray, is_area: bool = False) -> str:
    """Return the path through points of places from 0 to 1, interrupted where ``y`` is no number.

    ``is_area``: with all that is below it.
    """
    known = np.isfinite(y)
    begins = known & ~np.append(False, known[:-1])
    across = np.rint(x[known] * WIDTH).astype(int).tolist()
    down = np.rint((1 - y[known]) * HEIGHT).astype(int).tolist()
    # A point alone is a line of no length (h0), which round ends make a dot.
    points = "".join(
        f"M{at} {value}h0" if begin else f"L{at} {value}"
        for at, value, begin in zip(across, down, begins[known], strict=True)
    )
    return f"{points}V{HEIGHT}H{across[0]}Z" if is_area and across else points


def upright(places: FloatArray, line: str = f"0V{HEIGHT}") -> str:
    """Return a path of a line at each place of the axis."""
    return "".join(f"M{at} {line}" for at in np.unique(np.rint(places * WIDTH).astype(int)).tolist())


@dataclass(frozen=True)
class PlotLine:
    """One curve: ``x`` ascends. ``colour``: a number. ``pale``: thin, and not named when it is pointed at."""

    name: str
    x: FloatArray
    y: FloatArray
    colour: int = 0
    pale: bool = False


@dataclass(frozen=True)
class Chart:
    """What is drawn. ``shapes``: (classes, path, name) of each, the name empty where its values are not shown.
    ``legend``: (colour, text)."""

    title: str
    x: Scale
    y: Scale
    shapes: Sequence[tuple[str, str, str]]
    legend: Sequence[tuple[int, str]]
    note: str = ""
    is_stacked: bool = False


def line_chart(
    title: str,
    lines: Sequence[PlotLine],
    kind: str = "number",
    *,
    from_zero: bool = False,
    may_log: bool = False,
    marks: Sequence[float] = (),
    note: str = "",
) -> Chart | None:
    """Draw curves over one axis; None: there are none. ``marks``: values of x with an upright line each.

    Values that are no finite number are marked at the foot.
    """
    if not lines:
        return None
    x = scale_of(np.concatenate([one.x for one in lines]), "count", margin=0.0)
    y = scale_of(np.concatenate([one.y for one in lines]), kind, from_zero, may_log)
    named = [(one.colour, one.name) for one in lines if not one.pale]
    count = max(POINTS // max(len(named), 1), 80)
    shapes = [shape for one in lines for shape in _curve(one, x, y, count)]
    broken = np.concatenate([x.places(one.x[~np.isfinite(one.y)]) for one in lines])
    shapes.append(("broken", upright(np.rint(broken * 500) / 500, f"{HEIGHT}v-120"), ""))
    shapes.append(("mark", upright(x.places(np.array(marks[:200], dtype=float))), ""))
    notes = ", ".join(one for one in ("log scale" if y.log else "", note) if one)
    return Chart(title, x, y, shapes, named if len(named) > 1 else [], notes)


def _curve(one: PlotLine, x: Scale, y: Scale, count: int) -> list[tuple[str, str, str]]:
    def drawn(at: FloatArray, values: FloatArray) -> str:
        return path(x.places(at), np.where(np.isfinite(values), y.places(values), np.nan))

    line, pale = f"line s{one.colour}", f"line s{one.colour} pale"
    if one.pale:
        return [(pale, drawn(*thinned(one.x, one.y, count // 2)), "")]
    extremes = drawn(*thinned(one.x, one.y, count))
    if len(one.x) <= SMOOTH_FROM:
        return [(line, extremes, one.name)]
    return [(pale, extremes, ""), (line, drawn(*means(one.x, one.y)), one.name)]


def stacked_chart(
    title: str, x_values: FloatArray, bands: Sequence[tuple[str, FloatArray, int]], kind: str, note: str = ""
) -> Chart:
    """Draw (name, values, colour) of each band, the lowest first; each point is the mean of a part of the axis."""
    # NaN counts as nothing, so that all bands have the same points.
    tops = np.cumsum([means(x_values, np.nan_to_num(values))[1] for _, values, _ in bands], axis=0)
    points, _ = means(x_values, np.zeros(len(x_values)))
    x, y = scale_of(points, "count", margin=0.0), scale_of(tops[-1], kind, from_zero=True)
    shapes = [
        (f"band f{colour}", path(x.places(points), y.places(top), is_area=True), name)
        for (name, _, colour), top in zip(reversed(bands), reversed(tops), strict=True)
    ]
    legend = [(colour, name) for name, _, colour in reversed(bands)]
    return Chart(title, x, y, shapes, legend, note, is_stacked=True)
