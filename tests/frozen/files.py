"""The files of this folder: JSON with one sorted entry a line."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
VARIABLE = "TESTS_RECORD"
"""The folder into which tests write what they find instead of comparing it."""


@functools.cache
def read(name: str) -> dict[str, Any]:
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(name: str, entries: dict[str, Any]) -> None:
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(entries.items())]
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    read.cache_clear()


def is_recording(entries: Mapping[str, Any]) -> bool:
    """Whether tests are to write what they find; it is written."""
    if folder := os.environ.get(VARIABLE):
        with (Path(folder) / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entries) + "\n")
    return bool(folder)


def record(tests: Sequence[str]) -> dict[str, Any]:
    """Run the tests, and return what they found. A test may fail: its own expectation may be older."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-m", "not cluster and not gpu", "-p", "no:xdist"]
        subprocess.run(
            [*command, "--timeout", "1800", *tests],
            cwd=ROOT,
            env={**os.environ, VARIABLE: folder},
            check=False,
        )
        for file in sorted(Path(folder).glob("*.jsonl")):
            for line in file.read_text(encoding="utf-8").splitlines():
                found |= json.loads(line)
    return found
