"""A launch on a screen, from what its coordinator tells: its ranks, their stacks, whatever the message may hold."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from lockstep.history import JsonFields
from lockstep.report import job_screen, keys_line, ranks_now, stacks_panel, stacks_text
from tests.marks import examples

VIEW: dict[str, Any] = {
    "run": "train.py on 1 machine", "elapsed_s": 65.0,
    "latest": {"step": 20, "total_steps": 100, "loss": 2.5, "step_seconds": 0.5, "samples_per_second": 64, "mfu": 0.4},
    "ranks": [
        {"rank": 1, "host": "a", "pid": 11, "steps": 20, "part": "forward", "own_s": 0.4,
         "still_s": 0.1, "silent_s": 0.1, "ended": ""},
        {"rank": 0, "host": "a", "pid": 10, "steps": 20, "part": "communication", "own_s": 0.2,
         "still_s": 9.0, "silent_s": 0.1, "ended": ""},
        {"rank": 2, "host": "b", "pid": 12, "steps": 19, "part": "data", "own_s": 0.2, "still_s": 30, "silent_s": 30},
        {"rank": 3, "host": "b", "pid": 13, "steps": 20, "part": "", "ended": "has ended with exit code 0"},
    ],
    "sentences": [{"time": 95.0, "sentence": "Rank 1 is at data.py:88."}],
}  # fmt: skip


def text_of(shown: RenderableType, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_each_rank_has_its_step_what_it_does_and_a_mark_if_something_is_wrong() -> None:
    lines = text_of(job_screen(JsonFields(VIEW), [3.0, 2.5], 100.0)).splitlines()
    assert lines[0].split() == ["train.py", "on", "1", "machine", "running", "1", "min", "5", "s"]
    shown = {line.split("  ")[0].strip("│ "): line for line in lines}
    assert "20 of 100" in shown["step"] and "40 s left" in shown["step"]
    assert "2.5" in shown["loss"] and "█▁" in shown["loss"]
    assert "64 samples/s, MFU 40%" in shown["throughput"]
    assert "forward" in shown["rank 1 on a"]
    assert "nothing done for 9 s" in shown["rank 0 on a"]
    assert "silent for 30 s" in shown["rank 2 on b"]
    assert "has ended with exit code 0" in shown["rank 3 on b"]
    assert "5 s ago: Rank 1 is at data.py:88." in "\n".join(lines)


def test_a_launch_of_which_nothing_is_known_yet() -> None:
    text = text_of(job_screen(JsonFields({}), [], 100.0))
    assert "No step is complete yet." in text and "No rank has an Accelerator: none was made yet" in text


def test_equal_stacks_stand_together() -> None:
    stacks = [
        JsonFields({"rank": rank, "place": f"at train.py:{line}", "stack": f'  File "train.py", line {line}\n    f()'})
        for rank, line in ((2, 5), (0, 5), (1, 9))
    ]  # fmt: skip
    assert stacks_text(stacks) == (
        'ranks 0, 2, at train.py:5\n  File "train.py", line 5\n    f()\n\n'
        'rank 1, at train.py:9\n  File "train.py", line 9\n    f()\n'
    )
    assert "ranks 0, 2, at train.py:5" in text_of(stacks_panel(stacks))


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=30)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)  # fmt: skip
ranks = st.fixed_dictionaries({}, optional=dict.fromkeys(VIEW["ranks"][0], values))
views = st.fixed_dictionaries(
    {},
    optional={
        "run": values,
        "elapsed_s": values,
        "latest": st.one_of(values, st.dictionaries(st.sampled_from([*VIEW["latest"], "epoch"]), values)),
        "ranks": st.one_of(values, st.lists(st.one_of(ranks, values), max_size=4)),
        "sentences": st.one_of(values, st.lists(st.fixed_dictionaries({"time": values, "sentence": values}))),
    },
)


stacks = st.dictionaries(st.sampled_from(["rank", "host", "pid", "place", "stack"]), values)


@examples(150)
@given(view=views, stack=stacks)
def test_whatever_is_told_is_shown_without_control_characters(view: Any, stack: Any) -> None:
    job = JsonFields(view)
    shown = [job_screen(job, [math.nan, 1.0], 0.0), ranks_now(job), stacks_panel([JsonFields(stack)])]
    text = "".join(map(text_of, shown)) + stacks_text([JsonFields(stack)])
    assert all(character.isprintable() or character == "\n" for character in text)


@pytest.mark.parametrize("width", [40, 100])
def test_nothing_is_taken_for_markup(width: int) -> None:
    view = {
        **VIEW,
        "run": "[red]run[/]",
        "ranks": [{**VIEW["ranks"][0], "part": "[bold]part"}, VIEW["ranks"][2]],
    }
    view["ranks"][0]["host"] = "[blink]host"
    text = text_of(job_screen(JsonFields(view), [], 100.0), 200) + text_of(keys_line("[red]notice"), width)
    assert all(word in text for word in ("[red]run[/]", "[bold]part", "[blink]host", "[red]notice"))
    assert all(
        len(line) <= width for line in text_of(job_screen(JsonFields(VIEW), [], 100.0), width).splitlines()
    )
