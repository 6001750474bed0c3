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
LEAST = {"behaviour.py": 60, "objects.py": 20, "steps.py": 25, "attributes.py": 40, "refusals.py": 35}
"""Script -> how many lines it prints at least."""


def start(*words: str, path: str) -> subprocess.Popen[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    return subprocess.Popen(
        [sys.executable, *words, str(HERE / "run_scripts.py"), *(str(HERE / script) for script in LEAST)],
        env=known | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines(run: subprocess.Popen[str]) -> dict[str, list[Any]]:
    """Script -> the lines that it printed."""
    out, error = run.communicate(timeout=300)
    assert run.returncode == 0, error
    assert "Exception ignored" not in error
    found: dict[str, list[Any]] = {}
    for line in out.splitlines():
        if line.startswith("script "):
            found[line.partition(" ")[2]] = said = []
        elif line.startswith('["'):
            said.append(json.loads(line))
    return found


Lines = dict[str, list[Any]]


@pytest.fixture(scope="module")
def printed() -> tuple[Lines, Lines]:
    """What the scripts print there, and here."""
    pytest.importorskip("accelerate")
    runs = start(path=""), start("-m", "lockstep.compat.accelerate", path=str(HERE.parents[2] / "src"))
    there, here = map(lines, runs)
    return there, here


@pytest.mark.parametrize("script", [script for script in LEAST if script != "refusals.py"])
def test_each_name_does_what_it_does_there(script: str, printed: tuple[Lines, Lines]) -> None:
    there, here = (found[script] for found in printed)
    assert len(there) > LEAST[script]
    differing = [(theirs, ours) for theirs, ours in zip(there, here, strict=True) if theirs != ours]
    assert not differing, "\n".join(f"{theirs}\n  here {ours}" for theirs, ours in differing)


def test_bad_arguments_are_caught_by_what_catches_them_there(printed: tuple[Lines, Lines]) -> None:
    there, here = (found["refusals.py"] for found in printed)
    assert len(there) > LEAST["refusals.py"]
    assert [name for name, _ in there] == [name for name, _ in here]
    pairs = zip(there, here, strict=True)
    missed = [(name, theirs, ours) for (name, theirs), (_, ours) in pairs if not set(theirs) <= set(ours)]
    assert not missed
