"""The loops of Accelerate's guides, with it and by alias."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.command import LOCKSTEP
from tests.compat.processes import start

GUIDES = Path(__file__).with_name("guides.py")
SOURCE = str(Path(__file__).parents[3] / "src")
LAUNCH = (*LOCKSTEP[1:], "launch", "--cpu", "--nproc", "2", "--num-cpu-threads", "1")


def results(run: subprocess.Popen[str]) -> dict[str, Any]:
    said = run.communicate(timeout=900)[0]
    assert run.returncode == 0, said[-6000:]
    lines = [line[line.index('["') :] for line in said.splitlines() if '["' in line]
    return dict(json.JSONDecoder().raw_decode(line)[0] for line in lines)  # others write behind it


def numbers(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = [*tree.items()]
    return [leaf for item in tree for leaf in numbers(item)] if isinstance(tree, list) else [tree]


def same(one: Any, other: Any) -> bool:
    return all(
        math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) if isinstance(a, float) else a == b
        for a, b in zip(numbers(one), numbers(other), strict=True)
    )


@pytest.mark.timeout(400)
def test_the_loops_of_the_guides_give_the_numbers_that_they_give_with_accelerate() -> None:
    pytest.importorskip("accelerate")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    ours = (*LAUNCH, "--as-accelerate")
    runs = start(*launch, str(GUIDES), PYTHONPATH=""), start(*ours, str(GUIDES), PYTHONPATH=SOURCE)
    there, here = map(results, runs)
    assert len(there) == 24
    assert here.keys() == there.keys()
    assert {name: (here[name], there[name]) for name in there if not same(here[name], there[name])} == {}
