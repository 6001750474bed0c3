"""The record of torch versions is complete, and the README shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests import torch_versions
from tests.refusals import expect_refusal

ROOT = Path(__file__).parents[1]
RECORD = json.loads(torch_versions.RECORD.read_text())


def test_the_readme_shows_the_record() -> None:
    readme = torch_versions.README.read_text(encoding="utf-8")
    assert torch_versions.with_table(readme, torch_versions.table(RECORD)) == readme


def test_each_version_that_can_be_installed_has_passed_and_no_other_is_listed() -> None:
    (bounds,) = re.findall(r'"torch>=2\.(\d+),<2\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    lower, upper = map(int, bounds)
    passed = {int(version.split(".")[1]) for version in RECORD}
    assert passed == set(range(lower, upper))


def test_a_run_with_a_failure_is_not_taken_down(tmp_path: Path) -> None:
    results = tmp_path / "results.xml"
    results.write_text('<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1"/></testsuites>')
    found = torch_versions.counts(results)
    assert found == {"passed": 2, "skipped": 1, "failed": 2}
    expect_refusal(ValueError, "2", torch_versions.with_run, {}, "2.11.0", "3.10.1", "2026-01-01", found)
