"""Pictures of schedules: well-formed, one box for each action, where and how long it ran."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lockstep.config import Schedule
from lockstep.plan import COLOURS, Action, Times, action_lists, shade, simulate, svg, text_rows

NAMESPACE = "{http://www.w3.org/2000/svg}"
IMAGES = Path(__file__).parents[2] / "docs" / "images"
SAID = re.compile(r"rank (\d+), stage (\d+): (.+) of micro-batch (\d+), ([\d.]+) to ([\d.]+)")
KINDS = {
    "forward": "F",
    "backward": "B",
    "backward of the input": "I",
    "backward of the weights": "W",
}


def boxes(text: str, name: str = "action") -> list[ElementTree.Element]:
    return [box for box in ElementTree.fromstring(text).iter(f"{NAMESPACE}rect") if box.get("class") == name]


@pytest.mark.parametrize("name", Schedule.list())
def test_each_action_has_its_box_at_its_time(name: str) -> None:
    lists = action_lists(name, 3, 6)
    timeline = simulate(lists, Times(1, 1.5, 0.5))
    spans = {span.action[:4]: span for rank in timeline.ranks for span in rank}
    drawn = boxes(svg(timeline, "a <title> & more"))
    assert len(drawn) == sum(map(len, lists)) == len(spans)
    units = set()
    for box in drawn:
        match = SAID.fullmatch(box.findtext(f"{NAMESPACE}title") or "")
        assert match
        rank, stage, kind, batch, start, end = match.groups()
        span = spans.pop((int(rank), int(stage), KINDS[kind], int(batch)))
        assert (float(start), float(end)) == (span.start, span.end)
        units.add(round(float(box.get("width", 0)) / (span.end - span.start), 1))
    assert not spans
    assert len(units) == 1
    pairs = sum(action.paired for order in lists for action in order)
    assert len(boxes(svg(timeline, ""), "pair")) == pairs
    assert (pairs > 0) == (name == "dualpipev")


def test_boxes_of_a_rank_do_not_overlap_and_stay_inside() -> None:
    root = ElementTree.fromstring(svg(simulate(action_lists("zbv", 4, 40)), "zbv"))
    rows: dict[str, list[tuple[float, float]]] = {}
    for box in root.iter(f"{NAMESPACE}rect"):
        if box.get("class") == "action":
            x = float(box.get("x", 0))
            rows.setdefault(box.get("y", ""), []).append((x, x + float(box.get("width", 0))))
    assert len(rows) == 4
    for row in rows.values():
        row.sort()
        assert all(before[1] <= after[0] + 0.02 for before, after in itertools.pairwise(row))
        assert row[-1][1] <= float(root.get("width", 0))


def test_the_title_is_escaped_and_an_empty_timeline_is_a_picture() -> None:
    root = ElementTree.fromstring(svg(simulate([[]]), "a <b> & c"))
    assert root.findtext(f"{NAMESPACE}title") == "a <b> & c"


def test_stages_of_a_rank_have_colours_of_their_own() -> None:
    colours = [shade(kind, place, 5) for kind in COLOURS for place in range(6)]
    assert len(set(colours)) == len(colours)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble", "zbv"])
def test_the_pictures_of_the_documentation_are_those_of_the_command(name: str) -> None:
    drawn = (IMAGES / f"schedule-{name}.svg").read_text(encoding="utf-8")
    timeline = simulate(action_lists(name, 4, 8))
    assert f"bubble {timeline.bubble:.1%}" in drawn
    said = [box.findtext(f"{NAMESPACE}title") for box in boxes(drawn)]
    assert said == [box.findtext(f"{NAMESPACE}title") for box in boxes(svg(timeline, ""))]


def test_letters_stand_where_actions_run() -> None:
    def lines(lists: list[list[Action]], times: Times = Times()) -> list[str]:  # noqa: B008
        return ["".join(text for text, _ in row) for row in text_rows(simulate(lists, times))]

    assert lines(action_lists("1f1b", 2, 2)) == [
        "F0 F1       B0---    B1--- ",
        "   F0 B0--- F1 B1---       ",
    ]
    assert lines(action_lists("zbv", 1, 1)) == ["F0a F0b I0b W0b I0a W0a "]
    assert {len(line) for line in lines(action_lists("zbv", 4, 12), Times(1, 1.7, 0.3))} != {0}
    assert lines([[]]) == []
    assert lines(action_lists("gpipe", 2, 400)) == []
