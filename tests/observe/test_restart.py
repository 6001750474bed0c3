"""What trackers hold of a run that was killed and resumed, read by their own readers."""

from __future__ import annotations

import importlib
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep import Accelerator
from lockstep.observe.trackers import TrackerSet
from lockstep.tracking import GeneralTracker

ROOT = Path(__file__).parents[2]
RECORDED = yaml.safe_load((ROOT / "docs" / "data" / "trackers.yaml").read_text())
Points = list[tuple[int, float]]
FIRST: Points = [(step, float(step)) for step in range(10)]
REPLACED: Points = [*FIRST[:5], (5, 5.5), (6, 6.5)]


def tensorboard_points(folder: Path, tag: str = "loss") -> Points:
    board = EventAccumulator(str(folder))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(tag)]


def jsonl_points(path: Path) -> Points:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["step"], line["values"]["loss"]) for line in lines if "step" in line]


def run(session: str, folder: Path, *names: str) -> int:
    command = [sys.executable, "-m", "tests.observe.tracked_run", session, str(folder), *names]
    return subprocess.run(command, cwd=ROOT, timeout=300, check=False).returncode


def test_a_killed_and_resumed_run_has_each_step_once_in_its_files(tmp_path: Path) -> None:
    assert run("first", tmp_path, "tensorboard", "jsonl") == -9
    folder = tmp_path / "digits"
    assert jsonl_points(folder / "metrics.jsonl") == tensorboard_points(folder) == FIRST
    assert run("second", tmp_path, "tensorboard", "jsonl") == 0
    assert jsonl_points(folder / "metrics.jsonl") == tensorboard_points(folder) == REPLACED
    # A chart with several lines has a folder for each.
    assert tensorboard_points(folder / "lines_train", "lines") == REPLACED
    assert jsonl_points(folder / "metrics.jsonl.replaced") == FIRST[5:]


def wandb_points(folder: Path) -> list[Points]:
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    runs: dict[str, Points] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in log_records(path.read_bytes()):
            record = records.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                row = {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }
                runs.setdefault(path.stem, []).append((row["_step"], row["loss"]))
    return list(runs.values())


def log_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, which wandb writes after 7 bytes of its own."""
    at, record = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def trackio_points(folder: Path) -> list[Points]:
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    return [
        [(row["step"], row["loss"]) for row in storage.get_logs("digits", name)]
        for name in storage.get_runs("digits")
    ]


def mlflow_points(folder: Path) -> list[Points]:
    client = importlib.import_module("mlflow").MlflowClient()
    experiment = client.get_experiment_by_name("digits")
    return [
        [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")]
        for run in client.search_runs([experiment.experiment_id])
    ]


def dvclive_points(folder: Path) -> list[Points]:
    lines = Path(folder, "dvclive/plots/metrics/loss.tsv").read_text().splitlines()[1:]
    return [[(int(step), float(value)) for step, value in (line.split("\t")[-2:] for line in lines)]]


READERS: dict[str, Callable[[Path], list[Points]]] = {
    "wandb": wandb_points,
    "trackio": trackio_points,
    "mlflow": mlflow_points,
    "dvclive": dvclive_points,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", READERS)
def test_a_tracker_that_is_installed_leaves_what_was_recorded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name)
    monkeypatch.setenv("TRACKED_RUN_WAITS", "20")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    assert run("first", tmp_path, name) == -9
    assert run("second", tmp_path, name) == 0
    (seen,) = READERS[name](tmp_path)
    (row,) = [row for row in RECORDED if row["tracker"] == name]
    assert [[step, value] for step, value in seen] == row["points"], version(name)


def test_the_docs_have_the_row_of_each_tracker() -> None:
    text = (ROOT / "docs" / "tracking.md").read_text()
    rows = [
        f"| `{row['tracker']}` | {row['version']} | {row['left']} | {row['limits']} |" for row in RECORDED
    ]
    assert [row for row in rows if row not in text] == []


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: row["tracker"])
def test_the_rows_tell_what_was_recorded(row: dict[str, Any]) -> None:
    points = [tuple(point) for point in row["points"]]
    expected: dict[str, Points] = {
        "each step once, with the new values": REPLACED,
        "each step once; what was logged first stays": FIRST,
        "one run in two folders; steps 5 and 6 in both": [*FIRST[:9], *REPLACED[5:]],
    }
    assert points == expected[row["left"]]


@pytest.fixture
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    module = MagicMock(name=request.param)
    monkeypatch.setitem(sys.modules, request.param, module)
    module.init.return_value.id = "first"
    module.Run.return_value.hash = "first"
    return module


@pytest.mark.parametrize("service", ["wandb"], indirect=True)
@pytest.mark.parametrize("load_comes_first", [True, False])
def test_a_resumed_run_has_the_id_of_the_first(
    service: MagicMock, load_comes_first: bool, tmp_path: Path
) -> None:
    first = TrackerSet("wandb", tmp_path)
    first.start("digits")
    first.log({"loss": 1.0}, step=0)
    second = TrackerSet("wandb", tmp_path)
    service.init.return_value.id = "second"
    if load_comes_first:
        second.loaded()
    second.start("digits", init_kwargs={"wandb": {"mode": "offline"}})
    if not load_comes_first:
        second.loaded()
        service.init.return_value.finish.assert_called_once_with()
    service.init.assert_called_with(project="digits", id="first", resume="allow", mode="offline")
    assert len(second) == 1


@pytest.mark.parametrize("service", ["wandb"], indirect=True)
def test_a_run_that_loads_nothing_or_is_elsewhere_is_a_new_one(service: MagicMock, tmp_path: Path) -> None:
    for folder, is_loaded in ((tmp_path, False), (tmp_path, False), (tmp_path / "other", True)):
        trackers = TrackerSet("wandb", folder)
        if is_loaded:
            trackers.loaded()
        trackers.start("digits")
        trackers.log({"loss": 1.0}, step=0)
        service.init.assert_called_with(project="digits")


def test_a_checkpoint_loaded_in_the_middle_of_a_run_replaces_nothing(tmp_path: Path) -> None:
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path, cpu=True)
    accelerator.init_trackers("digits")
    folder = accelerator.save_state(tmp_path / "checkpoint")
    for step, value in FIRST:
        accelerator.log({"loss": value}, step=step)
    accelerator.load_state(folder)
    accelerator.log({"loss": 0.5}, step=3)
    accelerator.end_training()
    assert jsonl_points(tmp_path / "digits" / "metrics.jsonl") == [*FIRST, (3, 0.5)]


def test_values_without_a_step_wait_for_the_first_step(tmp_path: Path) -> None:
    """The user's own tracker is told once, before the first values with a step."""

    class Told(GeneralTracker):
        name, requires_logging_directory, tracker = "told", False, None

        def __init__(self) -> None:
            super().__init__()
            self.calls: list[object] = []

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            self.calls.append(step)

        def resume(self, step: int) -> None:
            self.calls.append(("resume", step))

    told = Told()
    trackers = TrackerSet(told)
    trackers.loaded()
    trackers.start("digits")
    for step in (None, 5, 6):
        trackers.log({}, step=step)
    assert told.calls == [None, ("resume", 5), 5, 6]
    trackers.loaded()
    trackers.log({}, step=4)
    assert told.calls[-1] == 4


@pytest.mark.parametrize("service", ["mlflow"], indirect=True)
def test_a_store_that_replaces_nothing_gets_no_step_twice(service: MagicMock, tmp_path: Path) -> None:
    client = service.MlflowClient.return_value
    client.get_run.return_value.data.metrics = {"loss": 9.0}
    client.get_metric_history.return_value = [MagicMock(step=step) for step in (8, 9, 5)]
    service.utils.validation.MAX_PARAMS_TAGS_PER_BATCH = 100
    service.start_run.return_value.info.run_id = "id"
    trackers = TrackerSet("mlflow", tmp_path)
    trackers.loaded()
    trackers.start("digits")
    for step in (9, 10):
        trackers.log({"loss": 1.0, "accuracy": 0.5}, step=step)
    logged = [(one.args[0], one.kwargs["step"]) for one in service.log_metrics.call_args_list]
    assert logged == [({"accuracy": 0.5}, 9), ({"loss": 1.0, "accuracy": 0.5}, 10)]
