"""The versions of torch on which the tests have passed: ``torch_versions.json``, and the README's table made of it.

``make test-torch TORCH=2.15.0`` runs the tests in an environment with that torch. When all of them have passed it calls
``python tests/torch_versions.py RESULTS``, with pytest's results in JUnit's XML, which puts the run into both files.
"""

from __future__ import annotations

import json
import platform
import sys
import xml.etree.ElementTree as ET
from datetime import date
from pathlib import Path

RECORD = Path(__file__).with_name("torch_versions.json")
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- torch versions -->\n", "<!-- end of torch versions -->"


def counts(results: Path) -> dict[str, int]:
    """How many tests there were in a JUnit file: ``passed``, ``skipped`` and ``failed``."""
    suites = list(ET.parse(results).getroot().iter("testsuite"))

    def total(key: str) -> int:
        return sum(int(suite.get(key, 0)) for suite in suites)

    failed, skipped = total("failures") + total("errors"), total("skipped")
    return {"passed": total("tests") - failed - skipped, "skipped": skipped, "failed": failed}


def with_run(
    record: dict[str, dict], torch: str, python: str, day: str, found: dict[str, int]
) -> dict[str, dict]:
    """The record with one more run, of which each version of torch keeps the last.

    Raises:
        ValueError: a test failed, or none passed.
    """
    if found["failed"] or not found["passed"]:
        raise ValueError(f"torch {torch}: {found['failed']} tests failed and {found['passed']} passed")
    version = torch.split("+")[0]
    run = {"python": python, "date": day, "passed": found["passed"], "skipped": found["skipped"]}
    runs = {**record, version: run}
    return dict(sorted(runs.items(), key=lambda item: tuple(map(int, item[0].split(".")))))


def table(record: dict[str, dict]) -> str:
    """The record as a table in Markdown."""
    rows = [
        f"| {torch} | {run['python']} | {run['passed']} | {run['date']} |" for torch, run in record.items()
    ]
    return "\n".join(["| torch | Python | tests passed | date |", "|---|---|---|---|", *rows]) + "\n"


def with_table(readme: str, shown: str) -> str:
    """The README with this table between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + shown + END + after


def main(results: str) -> None:
    import torch

    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    today = date.today().isoformat()
    record = with_run(record, str(torch.__version__), platform.python_version(), today, counts(Path(results)))
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    README.write_text(with_table(README.read_text(encoding="utf-8"), table(record)), encoding="utf-8")
    print(table(record))


if __name__ == "__main__":
    main(sys.argv[1])
