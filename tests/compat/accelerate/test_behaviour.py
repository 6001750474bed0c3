"""Names by alias against the installed Accelerate: the same script (``behaviour.py``) with both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("behaviour.py")


def lines(*words: str, path: str) -> list[Any]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    done = subprocess.run(
        [sys.executable, *words, str(SCRIPT)],
        env=known | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]


def test_each_name_does_what_it_does_there() -> None:
    pytest.importorskip("accelerate")
    source = str(Path(__file__).parents[3] / "src")
    there = lines(path="")
    here = lines("-m", "lockstep.compat.accelerate", path=source)
    assert len(there) > 100
    differing = [(theirs, ours) for theirs, ours in zip(there, here, strict=True) if theirs != ours]
    assert not differing, "\n".join(f"{theirs}\n  here {ours}" for theirs, ours in differing)
