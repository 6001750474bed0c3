"""Sharded models are saved at the end of a window only; what is loaded clears one that is open."""

from __future__ import annotations

import pytest

from lockstep.errors import CheckpointError, UsageError
from parallel import window_problem as windows
from parallel.window_problem import Setup


def saves_inside(setup: Setup) -> str:
    run = windows.Run(setup)
    run.go(1)
    with pytest.raises(UsageError) as raised:
        run.save()
    return str(raised.value)


@pytest.mark.parametrize(
    ("world_size", "setup"),
    [
        (2, Setup("zero=1", by_hand=True, no_sync=True)),
        (2, Setup("zero=2")),
        (2, Setup("zero=3")),
        (4, Setup("zero=2 replicate=2")),
    ],
    ids=str,
)
def test_a_save_inside_of_a_window_is_refused(run_distributed, world_size: int, setup: Setup) -> None:
    for sentence in run_distributed(saves_inside, world_size, setup):
        assert "Save after optimizer.step() and optimizer.zero_grad()." in sentence


def open_window_in_another_world(saved: windows.Saved) -> str:
    run = windows.Run(Setup())
    with pytest.raises(CheckpointError) as raised:
        run.load(saved)
    return str(raised.value)


def test_an_open_window_is_refused_in_another_world(run_distributed) -> None:
    [saved] = run_distributed(windows.save_at, 2, Setup(), 1)[0]
    assert "Load it with as many ranks" in run_distributed(open_window_in_another_world, 1, saved)[0]


def closed_window_over_an_open_one(setup: Setup) -> list[str]:
    run = windows.Run(setup)
    run.go(3)
    saved = run.save()
    run.go(windows.MICRO_BATCHES)
    again = windows.Run(setup)
    again.go(2)
    again.load(saved)
    again.go(windows.MICRO_BATCHES)
    return windows.different(again.parameters(), run.parameters())


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (2, "zero=1"),
        pytest.param(2, "zero=2", marks=pytest.mark.exhaustive),
        (2, "zero=3"),
        (4, "zero=2 replicate=2"),
    ],
)
def test_a_closed_window_clears_the_one_that_is_open(run_distributed, world_size: int, parallel: str) -> None:
    assert run_distributed(closed_window_over_an_open_one, world_size, Setup(parallel)) == [[]] * world_size
