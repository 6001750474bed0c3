"""How the run was set up: the machine, versions, and every setting with where it comes from."""

from __future__ import annotations

from lockstep.history.events import named
from lockstep.history.read import RunHistory
from lockstep.report.draw.html import long_table, paragraph, section
from lockstep.report.started import configuration, environment


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
    # what somebody has said comes before what nobody did
    rows.sort(key=lambda row: row[2] in ("default", ""))
    return section(title, long_table(("setting", "value", "from"), rows, "settings"))
