"""Curves that are thinned keep their spikes; axes, paths and tables say what they were given."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.report import (
    HEIGHT,
    MOST_ROWS,
    WIDTH,
    Chart,
    PlotLine,
    Scale,
    line_chart,
    means,
    path,
    scale_of,
    stacked_chart,
    template_environment,
    thinned,
)
from tests.report.runs import HOSTILE

finite = st.floats(-1e12, 1e12)


@given(st.lists(finite, min_size=1, max_size=400), st.integers(1, 40))
def test_a_thinned_curve_keeps_its_ends_and_its_extremes(values: list[float], count: int) -> None:
    x, y = np.arange(len(values), dtype=float), np.array(values)
    at, kept = thinned(x, y, count)
    assert len(at) <= 2 * count + 2
    assert (at[0], at[-1]) == (x[0], x[-1])
    assert (kept.min(), kept.max()) == (y.min(), y.max())
    assert (np.diff(at) > 0).all() and (y[at.astype(int)] == kept).all()


@given(st.lists(finite, min_size=50, max_size=400), st.integers(2, 20), st.integers(0, 10**6))
def test_a_single_spike_anywhere_stays(values: list[float], count: int, place: int) -> None:
    y = np.array(values)
    y[place % len(y)] = 1e13
    at, kept = thinned(np.arange(len(y), dtype=float), y, count)
    assert kept[at == place % len(y)] == 1e13


@given(st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), max_size=300), st.integers(1, 30))
def test_means_are_those_of_the_parts(values: list[float], count: int) -> None:
    x, y = np.arange(len(values), dtype=float), np.array(values)
    at, mean = means(x, y, count)
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    edges = np.linspace(x[0], x[-1], count + 1)[:-1] if len(y) else np.zeros(0)
    part = np.searchsorted(edges, x, side="right")
    groups = [y[part == one] for one in np.unique(part)]
    expected = [group.mean() for group in groups if len(group)]
    assert mean == pytest.approx(np.array(expected), abs=1e-6)
    assert len(at) == len(mean) and (np.diff(at) > 0).all()


def test_an_axis_is_logarithmic_only_where_something_stands_out() -> None:
    calm = np.linspace(2.0, 11.0, 100)
    assert not scale_of(calm, "number", may_log=True).log
    assert scale_of(np.append(calm, 1e4), "number", may_log=True).log
    assert not scale_of(np.append(calm, [1e4, -1.0]), "number", may_log=True).log
    assert scale_of(np.array([np.nan, np.inf]), "number") == Scale(0.0, 1.0)
    flat = scale_of(np.full(9, 3.0), "number")
    assert flat.low < 3 < flat.high
    assert scale_of(np.array([4.0]), "count", margin=0.0) == Scale(4.0, 5.0, "count")


def points(drawn: str) -> list[tuple[int, int]]:
    """Where a path goes."""
    return [(int(x), int(y)) for x, y in re.findall(r"[ML](\d+) (\d+)", drawn)]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=50))
def test_a_path_goes_through_the_points(given_points: list[tuple[float, float]]) -> None:
    x, y = (np.array(one) for one in zip(*given_points, strict=True))
    expected = [(round(a * WIDTH), round((1 - b) * HEIGHT)) for a, b in given_points]
    for drawn in (path(x, y), path(x, y, is_area=True)):
        assert np.abs(np.array(points(drawn)) - np.array(expected)).max() <= 1


def test_what_is_no_number_interrupts_a_path() -> None:
    x = np.linspace(0, 1, 6)
    assert path(x, np.array([0, np.nan, 1, 1, np.nan, 0])).count("M") == 3
    assert path(x, np.full(6, np.nan)) == ""


def filled(piece: str, **values: object) -> str:
    """A piece of a page."""
    source = '{% import "pieces.html.j2" as p with context %}' + piece
    return template_environment().from_string(source).render(**values)


def drawn_of(chart: Chart | None) -> str:
    return filled("{{ p.chart(chart) }}", chart=chart)


def test_a_chart_shows_a_spike_among_a_hundred_thousand_points_and_stays_small() -> None:
    x, y = np.arange(100_000.0), np.random.default_rng(0).random(100_000)
    y[54_321] = 9.0
    y[777] = np.nan
    chart = drawn_of(line_chart("Loss", [PlotLine("loss", x, y)]))
    assert len(chart) < 25_000
    tops = [min(down for _, down in points(one)) for one in re.findall(r'class="line[^>]*d="([^"]*)"', chart)]
    top = 1000 - 1000 * Scale(*map(float, re.findall(r'data-y="(\S+) (\S+)', chart)[0])).place(9.0)
    assert any(one == pytest.approx(top, abs=1) for one in tops)
    assert chart.count('class="broken"') == 1


def test_areas_stand_on_each_other() -> None:
    x = np.arange(10.0)
    bands = [("a", np.full(10, 1.0), 0), ("b", np.full(10, 3.0), 1)]
    chart = drawn_of(stacked_chart("Time", x, bands, "seconds"))
    low, high = map(float, re.findall(r'data-y="(\S+) (\S+)', chart)[0])
    heights = {name: points(one)[0][1] for name, one in re.findall(r'data-n="(\w)" d="([^"]*)"', chart)}
    assert low == 0
    assert heights == {"a": round(1000 - 1000 * 1 / high), "b": round(1000 - 1000 * 4 / high)}


def test_hostile_texts_stay_texts() -> None:
    chart = line_chart(HOSTILE, [PlotLine(HOSTILE, np.arange(3.0), np.arange(3.0))] * 2, note=HOSTILE)
    everything = drawn_of(chart) + filled(
        "{{ p.table([text], [[text]] * 50, text) }}{{ p.bar(text, [(text, 1, 0)], text, 1) }}", text=HOSTILE
    )
    assert "<script" not in everything and "<img" not in everything
    assert "\x1b" not in everything and "\u202e" not in everything and "\x00" not in everything
    assert everything.count("&#34;&gt;&lt;script&gt;") > 55


def test_long_tables_are_cut_and_say_so() -> None:
    shown = filled('{{ p.table(["a"], rows, "steps") }}', rows=[[row] for row in range(MOST_ROWS + 7)])
    assert shown.count("<td>") == MOST_ROWS
    assert "7 more are left out here." in shown
    assert shown.count("<details>") == 1 and "195 more steps" in shown
