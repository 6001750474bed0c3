"""Pieces of a page. Everything that comes from a run's files passes through ``safe``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from lockstep.words import plain_text

MOST_ROWS = 200
"""Rows of a table; of longer ones the last are left out, and counted."""
LONGEST_TABLE = 40_000
"""Characters of a table."""
SHOWN_ROWS = 12
"""Rows of a long table that are open; the rest opens by a click."""


def safe(value: object, limit: int = 1000) -> str:
    """As text that no browser takes for anything else."""
    return escape(plain_text(value, limit), quote=True)


def paragraph(text: str, style: str = "") -> str:
    return f'<p class="{style}">{safe(text, 3000)}</p>' if style else f"<p>{safe(text, 3000)}</p>"


def table(
    titles: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Sequence[str] = (),
    wide: Sequence[str] = (),
) -> str:
    """Cells are any values, and escaped. Columns of ``right`` are numbers, those of ``wide`` long texts."""
    every = list(rows)
    kinds = [' class="r"' if title in right else ' class="w"' if title in wide else "" for title in titles]
    head = "".join(f"<th{kind}>{safe(title)}</th>" for title, kind in zip(titles, kinds, strict=True))
    lines: list[str] = []
    length = 0
    for row in every[:MOST_ROWS]:
        cells = "".join(f"<td{kind}>{safe(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        length += len(cells)
        if length > LONGEST_TABLE:
            break
        lines.append(f"<tr>{cells}</tr>")
    left_out = len(every) - len(lines)
    more = paragraph(f"{left_out:,} more are left out here.", "quiet") if left_out else ""
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>{more}'


def long_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[object]],
    what: str,
    right: Sequence[str] = (),
    wide: Sequence[str] = (),
) -> str:
    """A table of which the first rows are seen at once. ``what`` the rest is, in the plural."""
    every = list(rows)
    if len(every) <= SHOWN_ROWS + 3:
        return table(titles, every, right, wide)
    rest = details(f"{len(every) - SHOWN_ROWS:,} more {what}", table(titles, every[SHOWN_ROWS:], right, wide))
    return table(titles, every[:SHOWN_ROWS], right, wide) + rest


def details(title: str, inner: str) -> str:
    return f"<details><summary>{safe(title)}</summary>{inner}</details>"


def section(title: str, *inner: str) -> str:
    """With an anchor made of its title."""
    return f'<section id="{anchor(title)}"><h2>{safe(title)}</h2>{"".join(inner)}</section>'


def anchor(title: str) -> str:
    return "-".join("".join(one if one.isalnum() else " " for one in title.lower()).split())


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """(classes of the colour, text)."""
    marks = "".join(f'<span><i class="{style}"></i>{safe(text, 80)}</span>' for style, text in entries)
    return f'<p class="legend">{marks}</p>'


def columns(*charts: str) -> str:
    """Beside each other where the page is wide enough."""
    return f'<div class="charts">{"".join(charts)}</div>'
