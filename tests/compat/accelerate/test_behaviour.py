"""Names by alias against the installed Accelerate: the same scripts of this folder with both."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.compat.processes import start

HERE = Path(__file__).parent
LEAST = {"behaviour.py": 60, "objects.py": 20, "steps.py": 25, "attributes.py": 40, "refusals.py": 35}
"""Script -> how many lines it prints at least."""


def lines(run: subprocess.Popen[str]) -> dict[str, list[Any]]:
    """Script -> the lines that it printed."""
    out = run.communicate(timeout=300)[0]
    assert run.returncode == 0 and "Exception ignored" not in out, out
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
    script = (str(HERE / "run_scripts.py"), *(str(HERE / name) for name in LEAST))
    alias = ("-m", "lockstep.compat.accelerate")
    runs = start(*script, PYTHONPATH=""), start(*alias, *script, PYTHONPATH=str(HERE.parents[2] / "src"))
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
