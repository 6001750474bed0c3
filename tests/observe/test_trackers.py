"""Which trackers a run has, and on which ranks they run."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError, MissingExtraError, UsageError
from lockstep.observe.trackers import TrackerSet, available_trackers, resolve_trackers
from lockstep.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    JSONLinesTracker,
    TensorBoardTracker,
    WandBTracker,
    on_main_process,
    register_tracker_class,
)
from lockstep.utils import LoggerType
from tests.refusals import expect_refusal


class ListTracker(GeneralTracker):
    """A user's tracker, as small as one can be."""

    name = "list"
    requires_logging_directory = False

    def __init__(self, project: str = "", **options: Any) -> None:
        super().__init__()
        self.project, self.options = project, options
        self.records: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.records

    def start(self) -> None:
        self.records.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.records.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.records.append((values, step, kwargs))

    def finish(self) -> None:
        self.records.append("finish")


class EveryRankTracker(ListTracker):
    name = "every_rank"
    main_process_only = False


@pytest.mark.parametrize("missing", ["name", "requires_logging_directory", "tracker"])
def test_a_custom_class_that_lacks_an_attribute_is_refused_by_its_name(missing: str) -> None:
    members = {"name": "x", "requires_logging_directory": False, "tracker": property(lambda self: None)}
    del members[missing]
    incomplete = type("Incomplete", (GeneralTracker,), members)
    with pytest.raises(UsageError, match=f"attributes: {missing}"):
        incomplete()


def test_an_incomplete_class_is_refused_before_it_is_constructed() -> None:
    incomplete = type("Incomplete", (GeneralTracker,), {"name": "incomplete"})
    expect_refusal(UsageError, "requires_logging_directory, tracker", resolve_trackers, incomplete)


def test_a_custom_tracker_sees_the_whole_run() -> None:
    tracker = ListTracker()
    trackers = TrackerSet([tracker])
    trackers.start("project", config={"lr": 1})
    trackers.log({"loss": 2}, step=3, log_kwargs={"list": {"extra": 4}, "other": {}})
    trackers.finish()
    assert tracker.records == ["start", {"lr": 1}, ({"loss": 2}, 3, {"extra": 4}), "finish"]


def test_a_class_is_constructed_with_the_project_and_its_arguments() -> None:
    trackers = TrackerSet(ListTracker)
    trackers.start("project", init_kwargs={"list": {"tags": ["a"]}})
    tracker = trackers.get("list")
    assert (tracker.project, tracker.options) == ("project", {"tags": ["a"]})


def test_a_users_class_can_be_named() -> None:
    register_tracker_class(ListTracker)
    assert resolve_trackers("list") == [ListTracker]


def test_a_registered_class_takes_the_place_of_one_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "jsonl", LOGGER_TYPE_TO_CLASS["jsonl"])
    mine = type("Mine", (ListTracker,), {"name": "jsonl"})
    with pytest.warns(UserWarning, match="Mine"):
        register_tracker_class(mine)
    assert resolve_trackers("jsonl") == [mine]


@pytest.mark.parametrize("log_with", ["tensorboard", LoggerType.TENSORBOARD, ["tensorboard", "tensorboard"]])
def test_words_enums_and_repeats_mean_one_tracker(log_with: Any, tmp_path: Path) -> None:
    assert resolve_trackers(log_with, tmp_path) == [TensorBoardTracker]


def test_all_means_every_tracker_that_can_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    names = [choice.name for choice in resolve_trackers("all", tmp_path)]
    assert names[:2] == ["tensorboard", "jsonl"]
    assert names == available_trackers()
    assert "wandb" not in names
    monkeypatch.setitem(sys.modules, "wandb", type(sys)("wandb"))
    assert WandBTracker in resolve_trackers(["all"], tmp_path)


def test_all_without_a_directory_leaves_out_those_that_write_files() -> None:
    assert not any(choice.requires_logging_directory for choice in resolve_trackers("all"))


def test_what_cannot_be_used_is_answered_with_what_can(monkeypatch: pytest.MonkeyPatch) -> None:
    expect_refusal(ConfigError, "'tensorboard'", resolve_trackers, "tensorbord")
    expect_refusal(ConfigError, "project_dir", resolve_trackers, "jsonl")
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    expect_refusal(MissingExtraError, "[comet]", resolve_trackers, "comet_ml")


def test_get_gives_the_tracker_or_what_is_underneath(tmp_path: Path) -> None:
    trackers = TrackerSet(["jsonl", ListTracker()], tmp_path)
    trackers.start("run")
    assert isinstance(trackers.get("jsonl"), JSONLinesTracker)
    assert trackers.get("list", unwrap=True) == ["start"]
    expect_refusal(ConfigError, "'jsonl'", trackers.get, "jsnl")
    trackers.finish()


def test_other_ranks_get_a_blank_tracker_and_write_nothing(tmp_path: Path) -> None:
    mine = ListTracker()
    trackers = TrackerSet(["tensorboard", mine], tmp_path, is_main=False)
    trackers.start("run", config={"lr": 1})
    trackers.log({"loss": 1})
    blank = trackers.get("tensorboard", unwrap=True)
    blank.add_histogram("weights", [1, 2]).more["key"] = 3
    with blank as entered:
        entered.log({"a": 1})
    assert list(blank) == []
    assert isinstance(copy.deepcopy(trackers.get("list")), GeneralTracker)
    expect_refusal(ConfigError, "tensorboard, list", trackers.get, "wandb")
    trackers.finish()
    assert mine.records == []
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_for_every_rank_runs_on_other_ranks() -> None:
    trackers = TrackerSet([EveryRankTracker, ListTracker], is_main=False)
    trackers.start("project")
    trackers.log({"loss": 1}, step=2)
    assert trackers.get("every_rank").records == ["start", ({"loss": 1}, 2, {})]
    assert len(trackers) == 1


def test_methods_marked_for_the_main_process_do_nothing_elsewhere(as_rank: Callable[..., Any]) -> None:
    class Marked(ListTracker):
        name = "marked"

        @on_main_process
        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            super().log(values, step)

    tracker = Marked()
    as_rank(1)
    tracker.log({"loss": 1})
    assert tracker.records == []
    tracker.main_process_only = False
    tracker.log({"loss": 1})
    as_rank(0)
    tracker.main_process_only = True
    tracker.log({"loss": 2})
    assert [record[0]["loss"] for record in tracker.records] == [1, 2]


def test_a_second_run_starts_only_after_the_first_has_ended() -> None:
    trackers = TrackerSet(ListTracker)
    trackers.start("first")
    expect_refusal(UsageError, "end_training", trackers.start, "second")
    trackers.finish()
    trackers.finish()
    trackers.start("second")
    assert trackers.get("list").project == "second"


def test_log_before_the_start_says_so_once() -> None:
    trackers = TrackerSet(ListTracker)
    with pytest.warns(UserWarning, match="before init_trackers"):
        trackers.log({"loss": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trackers.log({"loss": 1})
    expect_refusal(UsageError, "before init_trackers", trackers.get, "list")


def test_arguments_for_a_tracker_that_was_not_asked_for_are_refused() -> None:
    expect_refusal(ConfigError, "'list'", TrackerSet(ListTracker).start, "project", init_kwargs={"lst": {}})


def test_one_tracker_that_cannot_close_does_not_keep_the_others_open() -> None:
    class Broken(ListTracker):
        name = "broken"

        def finish(self) -> None:
            raise OSError("disk is full")

    whole = ListTracker()
    trackers = TrackerSet([Broken(), whole])
    trackers.start("project")
    with pytest.raises(OSError):
        trackers.finish()
    assert whole.records[-1] == "finish"
