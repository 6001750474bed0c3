"""Names by alias against the installed Accelerate: the same scripts of this folder with both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def lines(*words: str, path: str, script: str) -> list[Any]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    done = subprocess.run(
        [sys.executable, *words, str(HERE / script)],
        env=known | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]


@pytest.mark.parametrize(
    ("script", "least"), [("behaviour.py", 60), ("objects.py", 20), ("steps.py", 25), ("attributes.py", 45)]
)
def test_each_name_does_what_it_does_there(script: str, least: int) -> None:
    pytest.importorskip("accelerate")
    source = str(HERE.parents[2] / "src")
    there = lines(path="", script=script)
    here = lines("-m", "lockstep.compat.accelerate", path=source, script=script)
    assert len(there) > least
    differing = [(theirs, ours) for theirs, ours in zip(there, here, strict=True) if theirs != ours]
    assert not differing, "\n".join(f"{theirs}\n  here {ours}" for theirs, ours in differing)


def test_bad_arguments_are_caught_by_what_catches_them_there() -> None:
    pytest.importorskip("accelerate")
    there = lines(path="", script="refusals.py")
    here = lines("-m", "lockstep.compat.accelerate", path=str(HERE.parents[2] / "src"), script="refusals.py")
    assert len(there) > 35
    assert [name for name, _ in there] == [name for name, _ in here]
    pairs = zip(there, here, strict=True)
    missed = [(name, theirs, ours) for (name, theirs), (_, ours) in pairs if not set(theirs) <= set(ours)]
    assert not missed
