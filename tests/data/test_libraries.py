"""Data of other libraries: each sample once over a stopped and a resumed run, or a refusal, as docs/data.md has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.data import libraries

ROOT = Path(__file__).parents[2]


def found_by(folder: Path, *chosen: str) -> list[dict[str, Any]]:
    """What comes of the cases now, in processes of their own."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    command = [sys.executable, "-m", "tests.data.libraries", str(folder), *chosen]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    rows: list[dict[str, Any]] = yaml.safe_load(done.stdout)
    return rows


def test_no_sample_is_lost_or_read_twice_without_a_word() -> None:
    rows = libraries.recorded()
    assert {row["library"] for row in rows} == set(libraries.CASES)
    for row in rows:
        assert not [outcome for outcome in row["outcomes"] if "lost" in outcome or outcome == "ended"], row


def test_the_table_is_made_of_the_record() -> None:
    assert libraries.PAGE.read_text() == libraries.page()


def test_objects_with_iter_come_to_what_is_recorded(tmp_path: Path) -> None:
    expected = [row for row in libraries.recorded() if row["library"] == libraries.OWN]
    assert found_by(tmp_path, libraries.OWN) == expected, json.dumps(expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("library", [name for name in libraries.CASES if name != libraries.OWN])
def test_a_library_comes_to_what_is_recorded(library: str, tmp_path: Path) -> None:
    expected = [row for row in libraries.recorded() if row["library"] == library]
    if library not in libraries.installed() or libraries.version_of(library) != expected[0]["version"]:
        pytest.skip(f"{library} {expected[0]['version']} is not installed")
    assert found_by(tmp_path, library) == expected
