"""A comment stands above a statement, not behind its last bracket: there the formatter tears the statement."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks", "examples", "docs")
BEHIND_BRACKET = re.compile(r"^[ \t]*[\])}][^#'\"\n]*#(?! (?:fmt|type|noqa)\b).*$", re.MULTILINE)


def test_no_comment_stands_behind_the_last_bracket_of_a_statement() -> None:
    sources = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(sources) > 1000
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sources}
    found = {name: BEHIND_BRACKET.findall(text) for name, text in texts.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("    )  # as there", 1),
        ("):  # else it would end", 1),
        (") + index  # of all epochs", 1),
        (")  # fmt: skip", 0),
        ("    # Above the statement.\n    total = count(\n        rows\n    )", 0),
        ("]  # type: ignore[arg-type]", 0),
        ("}, '#')", 0),
    ],
)
def test_a_comment_behind_a_bracket_is_found(line: str, count: int) -> None:
    assert len(BEHIND_BRACKET.findall(line)) == count
