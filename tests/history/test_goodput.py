"""Each second of a run is productive, or lost to one cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import Accelerator
from lockstep.history import (
    MEASURES,
    ColumnReader,
    Goodput,
    RunHistory,
    event_of,
    goodput_of,
    read_lines,
    read_run,
)
from tests.observe.measures.test_measures import train


def start(attempt: int, time: float) -> dict[str, Any]:
    return {"event": "start", "time": time, "attempt": attempt}


def step(attempt: int, number: int, ended: float, total: float, **parts: float) -> dict[str, Any]:
    return {"step": number, "time": ended, "attempt": attempt, "seconds": {"total": total, **parts}}


def history(events: list[dict[str, Any]], steps: list[dict[str, Any]]) -> RunHistory:
    reader = ColumnReader()
    reader.add(steps)
    known = tuple(event for line in events if (event := event_of(line)) is not None)
    return RunHistory("run", Path("run"), reader.columns(), known, {})


def test_two_attempts_with_work_that_was_done_again() -> None:
    events = [
        start(0, 100.0),
        {"event": "checkpoint", "time": 112.0, "attempt": 0, "step": 1},
        start(1, 150.0),
        {"event": "loaded", "time": 153.0, "attempt": 1, "step": 1, "seconds": 2.0},
        {"event": "end", "time": 190.0, "attempt": 1},
    ]
    steps = [
        step(0, 1, 120.0, 10.0, save=3.0, data=1.0, forward=6.0),  # 110 to 120
        step(0, 2, 130.0, 10.0),
        step(0, 3, 141.0, 10.0),  # a second lies between
        step(1, 2, 170.0, 10.0, inference=4.0),
        step(1, 3, 180.0, 10.0, wait=2.0),
    ]
    found = goodput_of(history(events, steps))
    assert found == Goodput(
        total=90.0,
        productive=6.0 + 6.0 + 8.0,
        lost={
            "after": 10.0,  # 180 to 190
            "between": 1.0,
            "data": 1.0,
            "down": 9.0,  # 141 to 150
            "inference": 4.0,
            "loading": 2.0,
            "repeated": 20.0,
            "saving": 3.0,
            "startup": 10.0 + 8.0,
            "waiting": 2.0,
        },
    )
    assert found is not None and found.share == pytest.approx(20 / 90)


def test_a_step_that_ends_within_another_takes_no_time() -> None:
    """Clocks of two processes, or of one that was set back."""
    steps = [step(0, 1, 120.0, 20.0), step(0, 2, 110.0, 5.0), step(0, 3, 130.0, 15.0, data=15.0)]
    assert goodput_of(history([start(0, 90.0)], steps)) == Goodput(
        40.0, 20.0, {"data": 10.0, "startup": 10.0}
    )


times = st.floats(0, 1000, allow_nan=False)
junk = st.one_of(times, st.none(), st.text(max_size=3), st.just(float("nan")), st.integers(-5, 5))
an_event = st.fixed_dictionaries(
    {"event": st.sampled_from(["start", "loaded", "end", "?"])},
    optional={"time": junk, "attempt": junk, "seconds": junk},
)
a_step = st.fixed_dictionaries(
    {},
    optional={
        "step": st.integers(0, 20),
        "time": junk,
        "attempt": st.integers(0, 2),
        "seconds": st.one_of(
            junk, st.dictionaries(st.sampled_from(["total", "data", "save", "wait", "forward"]), junk)
        ),
    },
)


@given(st.lists(an_event, max_size=8), st.lists(a_step, max_size=12))
def test_every_second_is_counted_once(events: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    found = goodput_of(history(events, steps))
    if found is None:
        return
    assert found.productive >= 0 and all(seconds > 0 for seconds in found.lost.values())
    assert found.productive + sum(found.lost.values()) == pytest.approx(found.total, abs=1e-6)
    assert found.total == 0 or 0 <= found.share <= 1 + 1e-9


def test_a_run_in_two_attempts(tmp_path: Path) -> None:
    """The second goes on from a state that is older than where the first ended."""
    state = str(tmp_path / "state")
    first = Accelerator(project_dir=tmp_path)
    train(first, 6, save=state)
    first.end_training()
    other = Accelerator(project_dir=tmp_path)
    train(other, 6, load=state)
    other.end_training()
    again = Accelerator(project_dir=tmp_path)
    train(again, 6, load=state)
    again.end_training()
    folder = tmp_path / "run"
    lines = list(read_lines(folder / MEASURES))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 4, 5, 6]
    found = goodput_of(read_run(folder))
    assert found is not None and found == again.measures.goodput
    assert found.lost["repeated"] == pytest.approx(
        sum(line["seconds"]["total"] for line in lines[3:6]), rel=0.05, abs=1e-3
    )
    assert found.lost["saving"] > 0 and found.lost["down"] > 0 and found.lost["loading"] > 0
    assert 0 < found.share < 1


def test_steps_that_a_rollback_undid_were_done_again() -> None:
    events = [
        start(0, 100.0),
        {"event": "loaded", "time": 131.0, "attempt": 0, "step": 1, "seconds": 2.0, "rollback": True},
    ]
    steps = [step(0, 1, 110.0, 5.0), *(step(0, number, 100.0 + 10 * number, 10.0) for number in (2, 3))]
    steps += [step(0, number, 120.0 + 10 * number, 10.0) for number in (2, 3)]
    found = goodput_of(history(events, steps))
    assert found == Goodput(50.0, productive=25.0, lost={"repeated": 20.0, "startup": 5.0})
