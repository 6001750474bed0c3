"""A run that goes on counts on: in the same folder, with the steps of the state that it loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep import Accelerator
from lockstep.history import EVENTS, MEASURES, read_lines
from tests.observe.measures.test_measures import train


def steps_of(folder: Path) -> list[tuple[int, int]]:
    return [(line["attempt"], line["step"]) for line in read_lines(folder / "run" / MEASURES)]


def events_of(folder: Path) -> list[tuple[int, str]]:
    return [
        (line["attempt"], line["event"])
        for line in read_lines(folder / "run" / EVENTS)
        if line["event"] not in ("peak", "memory")
    ]


def test_steps_go_on_behind_a_loaded_state(tmp_path: Path) -> None:
    for attempt in range(2):
        accelerator = Accelerator(project_dir=tmp_path)
        train(accelerator, 6, load=str(tmp_path / "state") if attempt else "", save=str(tmp_path / "state"))
        assert accelerator.measures.step == 3 + 3 * attempt
        accelerator.end_training()
    assert steps_of(tmp_path) == [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6)]
    assert events_of(tmp_path) == [
        *((0, name) for name in ("start", "checkpoint", "end")),
        *((1, name) for name in ("restart", "start", "loaded", "checkpoint", "end")),
    ]
    loaded = next(line for line in read_lines(tmp_path / "run" / EVENTS) if line["event"] == "loaded")
    assert (loaded["step"], loaded["path"]) == (3, str(tmp_path / "state"))
    checkpoint = next(line for line in read_lines(tmp_path / "run" / EVENTS) if line["event"] == "checkpoint")
    assert checkpoint["bytes"] > 100


def test_a_run_that_loads_nothing_begins_a_folder_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        accelerator = Accelerator(project_dir=tmp_path)
        train(accelerator, 4)
        accelerator.end_training()
    assert steps_of(tmp_path) == [(0, 1), (0, 2)]
    assert (tmp_path / "run.1" / MEASURES).exists()


def test_a_script_that_loads_by_itself_says_how_far_it_is(tmp_path: Path) -> None:
    for steps in (0, 2):
        accelerator = Accelerator(project_dir=tmp_path)
        if steps:
            accelerator.measures.step = steps
        train(accelerator, 4)
        accelerator.end_training()
    assert steps_of(tmp_path) == [(0, 1), (0, 2), (1, 3), (1, 4)]


def on_two_ranks(folder: str, load: bool) -> list[Any]:
    accelerator = Accelerator(project_dir=folder)
    train(accelerator, 8, load=f"{folder}/state" if load else "", save=f"{folder}/state")
    accelerator.end_training()
    return [step.step for step in accelerator.measures.recent]


def test_ranks_count_alike_and_one_of_them_writes(tmp_path: Path, run_distributed: Any) -> None:
    assert run_distributed(on_two_ranks, 2, str(tmp_path), False) == [[1, 2], [1, 2]]
    assert run_distributed(on_two_ranks, 2, str(tmp_path), True) == [[3, 4], [3, 4]]
    assert steps_of(tmp_path) == [(0, 1), (0, 2), (1, 3), (1, 4)]
