"""Three faults in one run: the small form of ``benchmarks/faults.py``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .kinds import draw
from .soak import can_fill_a_disk, compare, soak

STEPS = 60


@pytest.mark.timeout(400)
def test_a_run_with_three_faults_ends_as_the_one_without(tmp_path: Path) -> None:
    last = "full disk" if can_fill_a_disk(tmp_path / "probe") else "exception"
    faults = draw(3, STEPS, ranks=2, seed=3, kinds=("kill launcher", "stop worker", last))
    with ThreadPoolExecutor() as beside:  # the other one waits most of its time
        undisturbed = beside.submit(soak, tmp_path / "undisturbed", STEPS, [])
        outcome = soak(tmp_path / "disturbed", STEPS, faults)
        undisturbed.result()
    compare(tmp_path / "disturbed", tmp_path / "undisturbed", outcome)
    assert outcome.struck == 3
    assert (outcome.lost, outcome.repeated) == (0, 0)
    assert outcome.equal_parameters
    assert outcome.orphans == 0
    assert outcome.unnamed == []
