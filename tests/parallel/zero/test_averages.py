"""Averages of a sharded model's weights (EMA, SWA)."""

from __future__ import annotations

import pytest

from parallel.zero import averages


@pytest.mark.parametrize("stage", [2, 3])
def test_averages_are_those_of_one_process(run_distributed, stage: int) -> None:
    assert run_distributed(averages.problems, 2, stage) == [[]] * 2


def test_an_average_that_another_library_has_sharded_follows(run_distributed) -> None:
    assert run_distributed(averages.on_another_mesh, 2) == [[]] * 2
