"""The example of the documentation fails as it says, in a pytest of its own with the fixtures; corrected, it passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "check_in_tests.md").read_text(encoding="utf-8")
EXAMPLE = re.findall(r"^```python\n(# test_training.py\n.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)[0]
REPORT = re.findall(r"^```text\n(.*?)\n```$", PAGE, flags=re.MULTILINE | re.DOTALL)[0]
WRONG, RIGHT = 'F.cross_entropy(model(x), y, reduction="sum") / rows', "F.cross_entropy(model(x), y)"


def run(folder: Path) -> tuple[int, str]:
    """The exit code of pytest, and what it prints."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            "--rootdir",
            str(folder),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=150,
    )
    return done.returncode, done.stdout + done.stderr


def without_last_digits(text: str) -> str:
    """Numbers of a run may be rounded otherwise by another torch."""
    return re.sub(r"\d\.\d{4,}|\d(\.\d)?e-\d", "NUMBER", text)


def test_the_example_fails_as_documented_and_passes_when_corrected(tmp_path: Path) -> None:
    assert WRONG in EXAMPLE
    assert RIGHT in PAGE
    (tmp_path / "test_training.py").write_text(EXAMPLE, encoding="utf-8")
    (tmp_path / "test_corrected.py").write_text(EXAMPLE.replace(WRONG, RIGHT), encoding="utf-8")
    code, output = run(tmp_path)
    assert code == 1, output
    assert "2 failed, 2 passed" in output
    assert without_last_digits(REPORT) in without_last_digits(output)
    assert "test_training.py:28: in test_ranks" in output
    assert "lockstep/testing" not in output.replace("lockstep.testing", "")
    table = [line for line in output.splitlines() if re.match(r"E +1  (forward|backward|optimizer)", line)]
    assert "gradient of `2.weight`" in "\n".join(table)
    assert len(table) == 2 * 12
