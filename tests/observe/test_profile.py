"""The profiler: its traces are read as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import ProfileKwargs
from lockstep.errors import ConfigError
from lockstep.observe import build_profiler


def operations(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "cpu_op"]


def multiply() -> torch.Tensor:
    return torch.ones(4, 5) @ torch.ones(5, 6)


def test_each_rank_writes_its_trace(tmp_path: Path, as_rank: Callable[..., Any]) -> None:
    handler = ProfileKwargs(activities=["cpu"], record_shapes=True, output_trace_dir=str(tmp_path / "new"))
    with build_profiler(handler, as_rank(1)):
        multiply()
    found = [
        event for event in operations(tmp_path / "new" / "profile_1.json") if event["name"] == "aten::mm"
    ]
    assert len(found) == 1
    assert found[0]["args"]["Input Dims"] == [[4, 5], [5, 6]]


def test_without_a_directory_the_block_gives_the_profiler_and_no_file(tmp_path: Path) -> None:
    with build_profiler(ProfileKwargs(activities=["cpu"])) as profiler:
        multiply()
    assert "aten::mm" in {event.key for event in profiler.key_averages()}
    assert list(tmp_path.iterdir()) == []


def test_a_schedule_decides_which_steps_are_recorded(tmp_path: Path) -> None:
    cycles = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1},
        on_trace_ready=lambda profiler: cycles.append(profiler.step_num),
        output_trace_dir=str(tmp_path),
    )
    with build_profiler(handler) as profiler:
        for _ in range(6):
            multiply()
            profiler.step()
    assert cycles == [4]
    assert sum(event["name"] == "aten::mm" for event in operations(tmp_path / "profile_0.json")) == 2


def test_a_schedule_that_never_recorded_says_so(tmp_path: Path) -> None:
    handler = ProfileKwargs(
        schedule_option={"wait": 5, "warmup": 1, "active": 1}, output_trace_dir=str(tmp_path)
    )
    with pytest.warns(UserWarning, match="before it recorded a step"):
        with build_profiler(handler) as profiler:
            profiler.step()
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_the_users_handler_exported_is_not_written_twice(tmp_path: Path) -> None:
    handler = ProfileKwargs(
        activities=["cpu"],
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(tmp_path / "mine.json")),
        output_trace_dir=str(tmp_path),
    )
    with pytest.warns(UserWarning, match="already exported"):
        with build_profiler(handler):
            multiply()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]


def test_an_unknown_activity_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="'cuda'"):
        with build_profiler(ProfileKwargs(activities=["cdua"])):  # type: ignore[list-item]
            pass
