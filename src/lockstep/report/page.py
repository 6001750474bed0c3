"""The page of a run: ``templates/``, filled in.

What stands in a page comes from files of others: all of it passes through ``plain_text``, and is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lockstep import words
from lockstep.history.attempts import RunStatus
from lockstep.history.events import configuration, environment
from lockstep.history.goodput import LOST
from lockstep.history.read import RunHistory
from lockstep.report import views
from lockstep.report.numbers import RunNumbers
from lockstep.report.summary import chapters, headline

TEMPLATES = Path(__file__).parent / "templates"
SCRIPT, STYLE = ((TEMPLATES / name).read_text("utf-8") for name in ("chart.js", "style.css"))
MOST_ROWS, LONGEST_TABLE = 200, 30_000
"""Rows and characters of a table; of longer ones the last are left out, and counted."""
SHOWN_ROWS = 12
"""Rows of a table that are open; the rest opens by a click."""
MOST_BARS = 32
LONGEST = 3000
"""Characters of a text."""
STATUS = {
    RunStatus.FINISHED: "good",
    RunStatus.RUNNING: "good",
    RunStatus.STOPPED: "warn",
    RunStatus.EMPTY: "warn",
}
"""Class of the word that says how a run stands; of any other it is ``bad``."""
LOST_COLOURS = dict(zip(LOST, (1, 1, 5, 6, 7, 0, 3, 8, 4, 9), strict=True))


def policy() -> str:
    """Return what the page may do: show its own styles and run its script, and load nothing from anywhere."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'"
    )


def run_page(run: RunHistory, numbers: RunNumbers, now: float) -> str:
    """Return the page of one run. ``now``: when it is made, in seconds since 1970."""
    settings = configuration(numbers.started)
    # What somebody has said comes before what nobody did.
    settings.sort(key=lambda row: row[2] in ("default", ""))
    return _filled(
        "run.html.j2",
        run=run,
        numbers=numbers,
        now=now,
        title=run.name,
        status=STATUS.get(numbers.status, "bad"),
        chapters=chapters(numbers),
        headline=headline(numbers),
        environment=environment(numbers.started),
        settings=settings,
    )


def check_page(
    answer: str,
    notes: Sequence[str],
    agrees: bool,
    now: float,
    **tables: Sequence[object],
) -> str:
    """Return the page of `lockstep check`.

    Args:
        tables: ``columns``, ``right`` (those of numbers) and rows of ``findings``; ``steps`` and rows of ``distances``.
    """
    status, chapters = "" if agrees else "bad", [("Answer", [answer]), ("Notes", notes)]
    title = "Numbers agree" if agrees else "Numbers differ"
    return _filled("check.html.j2", now=now, title=title, status=status, chapters=chapters, **tables)


def template_environment() -> Environment:
    """Return what fills in the templates: escaped, with the words of ``lockstep.words`` as filters."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else words.plain_text(value, LONGEST),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for name in ("bytes_text", "date", "digits", "duration", "percent", "short", "whole"):
        made.filters[name] = getattr(words, name)
    made.filters["fitting"] = fitting
    made.tests["known"] = math.isfinite
    constants = {"SHOWN_ROWS": SHOWN_ROWS, "MOST_BARS": MOST_BARS, "LOST": LOST}
    made.globals |= {
        **constants,
        "LOST_COLOURS": LOST_COLOURS,
        "views": views,
        "policy": policy(),
    }
    return made


def fitting(rows: Sequence[Sequence[object]]) -> Sequence[Sequence[object]]:
    """Return the first rows of a table, as many as it may have."""
    lengths = np.cumsum([sum(len(str(cell)) for cell in row) for row in rows])
    return rows[: min(MOST_ROWS, int(np.searchsorted(lengths, LONGEST_TABLE)))]


def _filled(template: str, **values: object) -> str:
    """Fill the page; ``titles``: of the sections, in which templates note them."""
    inline = {"script": Markup(SCRIPT), "style": Markup(STYLE)}
    return template_environment().get_template(template).render(**values, **inline, titles=[])
