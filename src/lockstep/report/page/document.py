"""The whole document of one run."""

from __future__ import annotations

import re

from lockstep.history.attempts import RunStatus
from lockstep.history.events import configuration, environment, named
from lockstep.history.read import RunHistory
from lockstep.report.draw.hover import SCRIPT, policy
from lockstep.report.draw.html import columns, long_table, paragraph, safe, section
from lockstep.report.draw.style import STYLE
from lockstep.report.numbers import RunNumbers
from lockstep.report.page.curves import curves
from lockstep.report.page.happened import checkpoints, data_position, timeline
from lockstep.report.page.memory import memory
from lockstep.report.page.step_time import communication, step_time
from lockstep.report.summary import chapters, headline
from lockstep.words import date


def machine(run: RunHistory) -> str:
    title = "Environment"
    starts = named(run.events, "start")
    rows = environment(starts[-1]) if starts else []
    if not rows:
        return section(
            title, paragraph("How the run was started is not known: events.jsonl has no such line.")
        )
    return section(title, long_table(("", "value"), rows, "entries", wide=("value",)))


def settings(run: RunHistory) -> str:
    title = "Configuration"
    starts = named(run.events, "start")
    rows = configuration(starts[-1]) if starts else []
    if not rows:
        return section(title, paragraph("No setting was written when the run started."))
    # What somebody has said comes before what nobody did.
    rows.sort(key=lambda row: row[2] in ("default", ""))
    return section(title, long_table(("setting", "value", "from"), rows, "settings"))


STATUS = {
    RunStatus.FINISHED: "good",
    RunStatus.RUNNING: "good",
    RunStatus.STOPPED: "warn",
    RunStatus.EMPTY: "warn",
    RunStatus.FAILED: "bad",
    RunStatus.HANGS: "bad",
    RunStatus.HUNG: "bad",
    RunStatus.SILENT: "bad",
}
_TITLES = re.compile(r'<section id="([^"]*)"><h2>(.*?)</h2>')


def run_page(run: RunHistory, numbers: RunNumbers, now: float) -> str:
    """``now``: when the page is made, in seconds since 1970."""
    sections = [
        curves(run, numbers),
        step_time(run, numbers),
        communication(run, numbers),
        memory(run, numbers),
        timeline(run, numbers),
        checkpoints(run, numbers),
        data_position(run, numbers),
        columns(machine(run), settings(run)),
    ]
    status = STATUS[numbers.status]
    top = [
        f'<h1>{safe(run.name)} <span class="status {status}">{safe(numbers.status.value)}</span></h1>',
        paragraph(_when(numbers, now), "quiet"),
        answer(chapters(numbers), status == "bad"),
        tiles(headline(numbers)),
    ]
    return document(run.name, top, sections)


def _when(numbers: RunNumbers, now: float) -> str:
    made = f"Page of {date(now)}."
    if not numbers.last_time >= numbers.first_time:
        return made
    return f"From {date(numbers.first_time)} to {date(numbers.last_time)}. {made}"


def answer(chapters_: list[tuple[str, list[str]]], bad: bool) -> str:
    """What people read first: (title, sentences)."""
    inner = "".join(
        f"<div><h2>{safe(title)}</h2><div>{''.join(paragraph(sentence) for sentence in sentences)}</div></div>"
        for title, sentences in chapters_
        if sentences
    )
    return f'<div class="answer{" bad" if bad else ""}">{inner}</div>'


def tiles(rows: list[tuple[str, str]]) -> str:
    """(name, value) of the most important numbers."""
    inner = "".join(f"<div><b>{safe(value)}</b><span>{safe(name)}</span></div>" for name, value in rows)
    return f'<div class="tiles">{inner}</div>' if inner else ""


def document(title: str, top: list[str], sections: list[str]) -> str:
    """One file that loads nothing: what it may do is said in its head."""
    body = "\n".join(one for one in sections if one)
    links = "".join(f'<a href="#{anchor}">{name}</a>' for anchor, name in _TITLES.findall(body))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>lockstep report: {safe(title)}</title><style>{STYLE}</style></head><body>\n"
        f"{''.join(top)}<nav>{links}</nav>\n{body}\n<script>{SCRIPT}</script></body></html>\n"
    )
