"""Several runs: the first setting that differs, and the first step at which their numbers part."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.history import RunHistory, read_run
from lockstep.report import (
    MOST_RUNS,
    comparison_sentences,
    numbers_part,
    report_of,
    settings_that_differ,
    told_apart,
)
from tests.refusals import expect_refusal
from tests.report.runs import BEGIN, CONFIGURATION, END, ERROR, Start, Synthetic, write_run

BASE = Synthetic(starts=(Start(1, 200, ends=END),))
NOW = BEGIN + 1e6


def runs(folder: Path, *made: Synthetic) -> list[RunHistory]:
    return [read_run(write_run(folder / f"run{place}", run)) for place, run in enumerate(made)]


@pytest.mark.parametrize("at", [1, 41, 200])
def test_the_first_step_that_differs_is_named(tmp_path: Path, at: int) -> None:
    first, other = runs(tmp_path, BASE, replace(BASE, noise_from=at))
    part = numbers_part(first, other)
    assert (part.step, part.quantity, part.common, part.equal) == (at, "the loss", 200, at - 1)
    here, there = (float(run.steps.loss[at - 1]) for run in (first, other))
    assert part.values == (here, there)
    relative = [abs(a - b) / max(a, b) for a, b in zip(first.steps.loss, other.steps.loss, strict=True)]
    assert part.distance == pytest.approx(max(relative))
    assert part.farthest == 1 + relative.index(max(relative))
    said = comparison_sentences([first, other], ["a", "b"])[-1]
    assert said.startswith(f"a and b part at step {at}: the loss is ")
    assert (f"{at - 1:,} steps before that are the same" in said) == (at > 1)


def test_equal_runs_are_called_equal(tmp_path: Path) -> None:
    both = runs(tmp_path, BASE, replace(BASE, data_wait=0.5))
    assert comparison_sentences(both, ["a", "b"]) == [
        "All settings that were written are the same.",
        "a and b have the same numbers in 200 common steps.",
    ]


def test_another_learning_rate_is_found_before_the_loss(tmp_path: Path) -> None:
    first, other = runs(tmp_path, BASE, replace(BASE, learning_rate=1e-3, noise_from=50))
    assert numbers_part(first, other).quantity == "the learning rate"
    assert numbers_part(first, other).step == 1


def test_steps_are_compared_as_they_were_done_last(tmp_path: Path) -> None:
    again = replace(BASE, starts=(Start(1, 120, ends=ERROR), Start(101, 200, ends=END, loaded=100)))
    part = numbers_part(*runs(tmp_path, BASE, again))
    assert (part.common, part.equal) == (200, 200)


def test_runs_without_a_common_step(tmp_path: Path) -> None:
    both = runs(tmp_path, BASE, replace(BASE, starts=(Start(500, 510, ends=END),)))
    assert "a and b have no step in common." in comparison_sentences(both, ["a", "b"])
    assert "</html>" in report_of([run.path for run in both], NOW).page()


def test_settings_that_differ_are_listed_with_their_sources(tmp_path: Path) -> None:
    changed = [dict(one) for one in CONFIGURATION]
    changed[0] |= {"value": "no", "source": "default"}
    changed.append({"name": "seed", "value": 7, "source": "train.py"})
    both = runs(tmp_path, BASE, replace(BASE, configuration=changed, starts=(Start(1, 200, 4, ends=END),)))
    found = settings_that_differ(both)
    assert [one.name for one in found] == ["mixed_precision", "seed", "ranks"]
    assert found[0].values == (("bf16", "--mixed-precision"), ("no", "default"))
    said = comparison_sentences(both, ["a", "b"])[0]
    assert said == (
        "The first setting that differs is mixed_precision: bf16 in a, no in b. 2 more entries differ."
    )


def test_a_comparison_has_all_in_its_page_and_its_json(tmp_path: Path) -> None:
    made = (BASE, replace(BASE, noise_from=41), replace(BASE, data_wait=0.2))
    report = report_of([run.path for run in runs(tmp_path, *made)], NOW)
    page = report.page()
    for name in report.names:
        assert page.count(name) > 5
    for title in (
        "Figures",
        "Curves",
        "Where a step",
        "Memory at the peak",
        "What was set differently",
        "On the clock",
    ):
        assert f"<h2>{title}" in page
    said = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert [run["name"] for run in said["runs"]] == list(report.names)
    assert [part["step"] for part in said["comparison"]["numbers"]] == [41, None]
    assert list(said["comparison"]["numbers"][0]) == [
        "name", "common", "equal", "step", "quantity", "values", "distance", "farthest",
    ]  # fmt: skip


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / place / "gpt" / "run", BASE) for place in ("a", "b")]
    assert told_apart([read_run(folder) for folder in folders]) == ["gpt (1)", "gpt (2)"]


def test_too_many_runs_are_refused() -> None:
    expect_refusal(ConfigError, "9 runs", report_of, ["nowhere"] * (MOST_RUNS + 1), NOW)
