"""Hosted trackers, against recording stand-ins for the services' packages."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from lockstep.errors import MissingExtraError, UsageError
from lockstep.observe.trackers import TRACKERS, TrackerSet
from lockstep.tracking import (
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    GeneralTracker,
    MLflowTracker,
    WandBTracker,
)

HOSTED = [entry for entry in TRACKERS.values() if entry.package and entry.name != "tensorboard"]


@pytest.fixture
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A recording module under the name of the service's package (the test's parameter)."""
    module = MagicMock(name=request.param)
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def started(tracker: GeneralTracker) -> Any:
    tracker.start()
    return tracker


@pytest.mark.parametrize("entry", HOSTED, ids=lambda entry: entry.name)
def test_without_its_package_construction_names_the_extra(
    entry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, entry.package, None)
    with pytest.raises(MissingExtraError, match=rf"'{entry.package}'.*\[{entry.extra}\]"):
        entry.kind("project")


@pytest.mark.parametrize("service", ["wandb", "trackio", "swanlab"], indirect=True)
def test_services_with_runs_get_init_config_log_and_finish(service: MagicMock) -> None:
    name = service._extract_mock_name()
    trackers = TrackerSet(name)
    trackers.start("project", config={"lr": 1}, init_kwargs={name: {"mode": "offline"}})
    trackers.log({"loss": 0.5}, step=3, log_kwargs={name: {"commit": False}})
    trackers.log_images({"x": ["image"]}, step=4)
    run = trackers.get(name, unwrap=True)
    trackers.finish()
    service.init.assert_called_once_with(project="project", mode="offline")
    service.config.update.assert_called_once_with({"lr": 1}, allow_val_change=True)
    assert run is service.init.return_value
    assert run.mock_calls == [
        call.log({"loss": 0.5}, step=3, commit=False),
        call.log({"x": [service.Image("image")]}, step=4),
        call.finish(),
    ]


@pytest.mark.parametrize("service", ["wandb"], indirect=True)
def test_wandb_logs_tables(service: MagicMock) -> None:
    tracker = started(WandBTracker("project"))
    tracker.log_table("answers", columns=["a"], data=[[1]], step=2)
    service.Table.assert_called_once_with(columns=["a"], data=[[1]], dataframe=None)
    tracker.run.log.assert_called_once_with({"answers": service.Table.return_value}, step=2)


@pytest.mark.parametrize("service", ["comet_ml"], indirect=True)
def test_comet_gets_metrics_others_and_dicts_of_metrics(service: MagicMock) -> None:
    tracker = started(CometMLTracker("project", online=False))
    tracker.store_init_configuration({"lr": 1})
    tracker.log({"loss": 0.5, "note": "text", "several": {"a": 1}}, step=3)
    tracker.finish()
    service.start.assert_called_once_with(project_name="project", online=False)
    assert service.start.return_value.mock_calls == [
        call.log_parameters({"lr": 1}),
        call.set_step(3),
        call.log_metric("loss", 0.5, step=3),
        call.log_other("note", "text"),
        call.log_metrics({"a": 1}, step=3),
        call.end(),
    ]


def test_an_old_comet_is_opened_as_an_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = MagicMock()
    monkeypatch.setitem(sys.modules, "comet_ml", SimpleNamespace(Experiment=experiment))
    started(CometMLTracker("project"))
    experiment.assert_called_once_with(project_name="project")


@pytest.mark.parametrize("service", ["aim"], indirect=True)
def test_aim_tracks_values_and_captioned_images_in_its_repository(service: MagicMock) -> None:
    tracker = started(AimTracker("project", "folder", log_system_params=False))
    tracker.store_init_configuration({"lr": 1})
    tracker.log({"loss": 0.5}, step=3, context={"subset": "train"})
    tracker.log_images({"x": ("image", "title")}, step=4, kwargs={"track": {"epoch": 1}})
    tracker.finish()
    run = service.Run.return_value
    service.Run.assert_called_once_with(repo="folder", log_system_params=False)
    assert run.name == "project"
    run.__setitem__.assert_called_once_with("hparams", {"lr": 1})
    service.Image.assert_called_once_with("image", caption="title")
    assert run.track.mock_calls == [
        call(0.5, name="loss", step=3, context={"subset": "train"}),
        call(service.Image.return_value, name="x", step=4, epoch=1),
    ]
    run.close.assert_called_once_with()


@pytest.mark.parametrize("service", ["mlflow"], indirect=True)
def test_mlflow_creates_an_experiment_and_logs_parameters_in_batches(service: MagicMock) -> None:
    service.search_experiments.return_value = []
    service.utils.validation = SimpleNamespace(MAX_PARAM_VAL_LENGTH=10, MAX_PARAMS_TAGS_PER_BATCH=2)
    tracker = started(MLflowTracker("project", tags='{"a": "b"}', run_name="first"))
    with pytest.warns(UserWarning, match="'long'"):
        tracker.store_init_configuration({"a": 1, "long": "x" * 11, "b": 2, "c": 3})
    with pytest.warns(UserWarning, match="'note'"):
        tracker.log({"loss": 0.5, "note": "text"}, step=3)
    tracker.log_artifact("file")
    tracker.finish()
    service.create_experiment.assert_called_once_with(name="project", artifact_location=None, tags={"a": "b"})
    service.start_run.assert_called_once_with(
        run_id=None,
        experiment_id=service.create_experiment.return_value,
        run_name="first",
        nested=False,
        tags={"a": "b"},
        description=None,
    )
    assert service.log_params.mock_calls == [call({"a": 1, "b": 2}), call({"c": 3})]
    service.log_metrics.assert_called_once_with({"loss": 0.5}, step=3)
    service.log_artifact.assert_called_once_with(local_path="file", artifact_path=None)
    service.end_run.assert_called_once_with()


@pytest.mark.parametrize("service", ["mlflow"], indirect=True)
def test_mlflow_obeys_its_environment_before_the_arguments(
    service: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from environment")
    monkeypatch.setenv("MLFLOW_RUN_ID", "17")
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "true")
    service.search_experiments.return_value = [SimpleNamespace(experiment_id="5")]
    started(MLflowTracker("project", run_id="1"))
    service.search_experiments.assert_called_once_with(filter_string="name = 'from environment'")
    arguments = service.start_run.call_args.kwargs
    assert (arguments["run_id"], arguments["experiment_id"], arguments["nested"]) == ("17", "5", True)


@pytest.mark.parametrize("service", ["clearml"], indirect=True)
def test_clearml_splits_names_into_title_and_series(service: MagicMock) -> None:
    service.Task.current_task.return_value = None
    tracker = started(ClearMLTracker("project", task_name="mine"))
    task = service.Task.init.return_value
    tracker.store_init_configuration({"lr": 1})
    tracker.log({"eval_loss": 0.5, "loss": 1}, step=3)
    tracker.log({"best": 2})
    with pytest.warns(UserWarning, match="'note'"):
        tracker.log({"note": "text"})
    tracker.log_table("test_t", columns=["a"], data=[[1]])
    with pytest.raises(UsageError):
        tracker.log_table("t")
    tracker.finish()
    service.Task.init.assert_called_once_with(project_name="project", task_name="mine")
    task.connect_configuration.assert_called_once_with({"lr": 1})
    assert task.get_logger.return_value.mock_calls == [
        call.report_scalar(title="loss", series="eval", value=0.5, iteration=3),
        call.report_scalar(title="loss", series="train", value=1, iteration=3),
        call.report_single_value(name="best", value=2),
        call.report_table(title="t", series="test", table_plot=[["a"], [1]], iteration=None),
    ]
    task.close.assert_called_once_with()


@pytest.mark.parametrize("service", ["clearml"], indirect=True)
def test_a_clearml_task_of_the_script_itself_is_left_open(service: MagicMock) -> None:
    tracker = started(ClearMLTracker("project"))
    tracker.finish()
    assert tracker.tracker is service.Task.current_task.return_value
    service.Task.init.assert_not_called()
    tracker.tracker.close.assert_not_called()


@pytest.mark.parametrize("service", ["dvclive"], indirect=True)
def test_dvclive_sets_the_step_logs_and_advances(service: MagicMock) -> None:
    tracker = started(DVCLiveTracker("ignored", dir="folder"))
    tracker.store_init_configuration({"lr": 1})
    tracker.log({"loss": 0.5}, step=3, timestamp=True)
    tracker.finish()
    live = service.Live.return_value
    service.Live.assert_called_once_with(dir="folder")
    assert live.step == 3
    assert live.mock_calls == [
        call.log_params({"lr": 1}),
        call.log_metric("loss", 0.5, timestamp=True),
        call.next_step(),
        call.end(),
    ]


@pytest.mark.parametrize("service", ["dvclive"], indirect=True)
def test_dvclive_uses_the_live_object_that_it_was_given(service: MagicMock) -> None:
    live = MagicMock()
    assert started(DVCLiveTracker(live=live)).tracker is live
    service.Live.assert_not_called()
