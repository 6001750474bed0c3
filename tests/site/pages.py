"""What every generated page is written with: the project's root, tables, blocks between two comments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(text: str) -> str:
    """Text as a table's cell may have it."""
    return " ".join(text.split()).replace("|", "\\|")


def with_block(text: str, name: str, content: str) -> str:
    """The page with what stands between ``<!-- name -->`` and ``<!-- end of name -->`` replaced."""
    block = re.compile(rf"(?<=<!-- {name} -->\n\n).*?(?=\n<!-- end of {name} -->)", re.DOTALL)
    if block.search(text) is None:
        raise ValueError(f"no block {name!r}")
    return block.sub(lambda _: content, text)
