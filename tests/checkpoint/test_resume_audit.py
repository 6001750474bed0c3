"""The audit of resumed runs through the public API; ``benchmarks/resume_audit.py`` has more trials, and kills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from checkpoint.audit.harness import examine, new_folder, on_each, resumed
from checkpoint.audit.judge import Verdict
from checkpoint.audit.loaders import KINDS
from checkpoint.audit.run import AFTER, Final, Run, until_the_stop
from checkpoint.audit.trials import WORLDS, Trial, draw_trial

EACH = 4
"""Trials for each pair of worlds."""


def trials_of(before: int, after: int) -> list[Trial]:
    """The next kinds of loaders in each pair of worlds, with and without windows in turn."""
    first = WORLDS.index((before, after)) * EACH
    return [draw_trial(before, after, number) for number in range(first, first + EACH)]


@pytest.mark.parametrize(("before", "after"), WORLDS)
def test_a_run_that_stops_anywhere_goes_on_as_if_it_had_not(
    run_distributed, tmp_path: Path, before: int, after: int
) -> None:
    verdicts = examine(run_distributed, trials_of(before, after), tmp_path)
    assert [verdict for verdict in verdicts if not verdict.is_right] == []


def test_the_trials_here_have_all_kinds_and_stop_inside_of_windows() -> None:
    stops = [(trial, trial.stop % trial.kind.steps(trial.before)) for trial in trials_of(1, 1)]
    assert any(trial.accumulation > 1 and place % trial.accumulation for trial, place in stops)
    assert {trial.kind_name for worlds in WORLDS for trial in trials_of(*worlds)} == set(KINDS)


def loses(part: Callable[[Run], None], trial: Trial, folder: Path) -> Final:
    run = Run(trial, AFTER, folder, trial.seed + 1)
    run.accelerator.load_state()
    start = run.progress.micro_batches
    part(run)
    run.train()
    return run.final(start)


def momentum(run: Run) -> None:
    for state in run.optimizer.state.values():
        state["momentum_buffer"].zero_()


def gradients(run: Run) -> None:
    for parameter in run.prepared.parameters():
        parameter.grad = None


def place_in_window(run: Run) -> None:
    run.accelerator.gradient_state.micro_batch = 0


def place_in_data(run: Run) -> None:
    run.loader.set_epoch(run.loader.epoch + 1)


def schedule(run: Run) -> None:
    run.schedule.scheduler.last_epoch = 0


def generators(run: Run) -> None:
    torch.manual_seed(0)


LOSSES = [momentum, gradients, place_in_window, place_in_data, schedule, generators]


@pytest.mark.parametrize("after", [1, 2])
def test_the_audit_finds_what_a_resumed_run_has_lost(run_distributed, tmp_path: Path, after: int) -> None:
    trial = replace(
        draw_trial(1, after, 0), kind_name="shuffled", accumulation=3, optimizer="sgd", precision="no"
    )
    # Another world goes on from the end of a window.
    trial = replace(trial, stop=5 if after == 1 else 6)
    trial = replace(trial, parallel=("auto", "auto"), clips=False)
    found: dict[str, Verdict] = {}
    for part in LOSSES:
        job = (trial, new_folder(tmp_path))
        run_distributed(on_each, 1, until_the_stop, [job])
        [found[part.__name__]] = resumed(run_distributed, [job], partial(loses, part))
    missed = {name for name, verdict in found.items() if verdict.is_right}
    # Of no use in another world, at the end of a window.
    unused = {"generators", "gradients", "place_in_window"}
    assert missed == (set() if after == 1 else unused)
    wrong = {name for name, verdict in found.items() if verdict.wrong_samples}
    assert wrong == {"place_in_data"}
