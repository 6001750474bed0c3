"""Four faults in one run: the small form of ``benchmarks/faults.py``."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from .kinds import KINDS, draw
from .soak import can_fill_a_disk, compare, soak

STEPS = 120
OFTEN = ("kill worker", "kill launcher", "stop worker")


@pytest.mark.timeout(400)
def test_a_run_with_four_faults_ends_as_the_one_without(tmp_path: Path) -> None:
    last = "full disk" if can_fill_a_disk(tmp_path / "probe") else "exception"
    faults = draw(4, STEPS, ranks=2, seed=3, kinds=(*OFTEN, last))
    with ThreadPoolExecutor() as beside:  # the other one waits most of its time
        undisturbed = beside.submit(soak, tmp_path / "undisturbed", STEPS, [])
        outcome = soak(tmp_path / "disturbed", STEPS, faults)
        undisturbed.result()
    compare(tmp_path / "disturbed", tmp_path / "undisturbed", outcome)
    assert outcome.struck == 4
    assert (outcome.lost, outcome.repeated) == (0, 0)
    assert outcome.equal_parameters
    assert outcome.orphans == 0
    assert outcome.unnamed == []


def test_a_plan_has_every_kind_equally_often_at_moments_apart() -> None:
    faults = draw(50, 2000, ranks=2, seed=0)
    counts = Counter(fault.kind for fault in faults)
    assert counts.keys() == set(KINDS)
    assert max(counts.values()) - min(counts.values()) <= 1
    gaps = [later.step - fault.step for fault, later in pairwise(faults)]
    assert min(gaps) >= 15
    assert all(0 < fault.step < 2000 for fault in faults)
    assert {fault.rank for fault in faults} == {0, 1}
