"""TensorBoard and JSON lines: what they write, read back by TensorBoard's own reader and by json."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep import DistributedType
from lockstep.errors import MissingExtraError
from lockstep.observe.trackers import TrackerSet
from lockstep.tracking import JSONLinesTracker, TensorBoardTracker
from tests.refusals import expect_refusal


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def lines(folder: Path) -> list[Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_tensorboard_reads_the_logged_scalars_back(tmp_path: Path) -> None:
    trackers = TrackerSet("tensorboard", tmp_path)
    trackers.start("run")
    trackers.log({"loss": 0.5, "tensor": torch.tensor([2.0]), "numpy": np.float32(3), "flag": True}, step=1)
    trackers.log({"loss": 0.25}, step=2)
    trackers.finish()
    board = events(tmp_path / "run")
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert board.Scalars("tensor")[0].value == 2
    assert board.Scalars("numpy")[0].value == 3
    assert board.Scalars("flag")[0].value == 1


def test_tensorboard_keeps_strings_as_text_and_dicts_as_lines_of_one_chart(tmp_path: Path) -> None:
    trackers = TrackerSet("tensorboard", tmp_path)
    trackers.start("run")
    trackers.log({"sample": "hello", "losses": {"train": 1.0, "valid": torch.tensor(2.0)}}, step=7)
    trackers.finish()
    board = events(tmp_path / "run")
    assert board.Tensors("sample/text_summary")[0].tensor_proto.string_val == [b"hello"]
    assert events(tmp_path / "run" / "losses_valid").Scalars("losses")[0].value == 2
    assert events(tmp_path / "run" / "losses_train").Scalars("losses")[0].step == 7


def test_tensorboard_stores_hyperparameters_in_the_board_and_in_a_file(tmp_path: Path) -> None:
    config = {
        "lr": 1e-3,
        "layers": [1, 2],
        "name": "gpt",
        "none": None,
        "type": DistributedType.NO,
        "on": True,
    }
    trackers = TrackerSet("tensorboard", tmp_path)
    trackers.start("run", config=config)
    trackers.finish()
    (path,) = (tmp_path / "run").glob("*/hparams.yml")
    stored = yaml.safe_load(path.read_text())
    assert stored == {**config, "type": "NO"}
    board = events(path.parent)
    metadata = board.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"lr" in metadata
    assert b"layers" in metadata


def test_tensorboard_stores_images(tmp_path: Path) -> None:
    tracker = TensorBoardTracker("run", tmp_path)
    tracker.start()
    tracker.log_images({"digits": np.zeros((2, 3, 4, 5), dtype=np.uint8)}, step=3)
    tracker.finish()
    image = events(tmp_path / "run").Images("digits")[0]
    assert (image.step, image.height, image.width) == (3, 4, 10)


def test_tensorboard_says_once_what_it_leaves_out(tmp_path: Path) -> None:
    trackers = TrackerSet("tensorboard", tmp_path)
    trackers.start("run")
    with pytest.warns(UserWarning, match="'losses'"):
        trackers.log({"losses": torch.ones(3)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trackers.log({"losses": torch.ones(3)})
    trackers.finish()


def test_json_lines_hold_step_time_and_plain_values(tmp_path: Path) -> None:
    trackers = TrackerSet("jsonl", tmp_path)
    trackers.start("run", config={"lr": 0.1, "path": Path("a")})
    trackers.log(
        {"loss": torch.tensor(0.5, requires_grad=True), "n": np.int64(3), "v": torch.ones(2)}, step=4
    )
    trackers.log({"note": "ü\n", "nested": {"a": np.float32(0.5)}})
    config, first, second = lines(tmp_path / "run")
    assert config["config"] == {"lr": 0.1, "path": "a"}
    assert (first["step"], first["values"]) == (4, {"loss": 0.5, "n": 3, "v": [1.0, 1.0]})
    assert second["values"] == {"note": "ü\n", "nested": {"a": 0.5}}
    assert second["step"] is None
    assert second["time"] >= first["time"] > 1.6e9
    trackers.finish()


def test_json_lines_stay_json_with_nan_and_infinity(tmp_path: Path) -> None:
    tracker = JSONLinesTracker("run", tmp_path)
    tracker.start()
    tracker.log({"a": float("nan"), "b": torch.tensor([np.inf, -np.inf])}, step=1)
    tracker.finish()
    values = lines(tmp_path / "run")[0]["values"]
    assert values == {"a": "NaN", "b": ["Infinity", "-Infinity"]}
    assert np.isnan(float(values["a"]))
    assert [float(word) for word in values["b"]] == [np.inf, -np.inf]


def test_json_lines_of_a_resumed_run_are_appended(tmp_path: Path) -> None:
    for step in (1, 2):
        trackers = TrackerSet("jsonl", tmp_path)
        trackers.start("run")
        trackers.log({"loss": 1.0}, step=step)
        trackers.finish()
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2]


def test_tensorboard_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    expect_refusal(MissingExtraError, "[tensorboard]", TensorBoardTracker, "run", "folder")
