"""What happened while the run went on: its starts, checkpoints, the data that it has seen."""

from __future__ import annotations

import math

import numpy as np

from lockstep.history.events import RunEvent
from lockstep.history.goodput import LOST
from lockstep.history.read import RunHistory
from lockstep.report.draw.charts import bars
from lockstep.report.draw.html import long_table, paragraph, section
from lockstep.report.numbers import RunNumbers
from lockstep.report.page.timeline import listing, picture
from lockstep.words import bytes_text, duration, percent, short, whole

COLOURS = {
    "startup": 1,
    "loading": 1,
    "data": 5,
    "saving": 6,
    "waiting": 7,
    "inference": 0,
    "repeated": 3,
    "between": 8,
    "after": 4,
    "down": 9,
}


def timeline(run: RunHistory, numbers: RunNumbers) -> str:
    drawn, listed = picture(numbers, run), listing(run.events, numbers.first_time)
    if not drawn and not listed:
        return section(
            "On the clock", paragraph("No event and no time was written: events.jsonl is not there.")
        )
    return section("On the clock", _goodput(numbers), drawn, listed)


def _goodput(numbers: RunNumbers) -> str:
    wall = numbers.goodput
    if wall is None or not wall.total > 0:
        return ""
    rows = [
        (
            "steps that count",
            [("steps that count", wall.productive, 2)],
            _share_of_time(wall.productive, wall.total),
        )
    ]
    rows += [
        (LOST[name], [(LOST[name], seconds, COLOURS[name])], _share_of_time(seconds, wall.total))
        for name, seconds in sorted(wall.lost.items(), key=lambda one: -one[1])
        if seconds > 0.001 * wall.total
    ]
    return bars(rows, wall.total)


def _share_of_time(seconds: float, wall: float) -> str:
    return f"{percent(seconds / wall)}, {duration(seconds)}"


def checkpoints(run: RunHistory, numbers: RunNumbers) -> str:
    title = "Checkpoints"
    if not numbers.checkpoints:
        return section(
            title,
            paragraph(
                "None was written: a run that stops has to start from the beginning. accelerator.save_state() "
                "writes one."
            ),
        )
    newest = numbers.checkpoints[::-1]
    rows = [
        (
            event.text("path"),
            whole(event.step) if math.isfinite(event.step) else "",
            duration(event.number("seconds")) if math.isfinite(event.number("seconds")) else "",
            bytes_text(event.number("bytes")) if math.isfinite(event.number("bytes")) else "",
            _answer(event, "verified"),
            _capsule_text(run, event),
        )
        for event in newest
    ]
    seconds = [event.number("seconds") for event in newest if math.isfinite(event.number("seconds"))]
    sentence = f"{whole(len(rows))} were written"
    if seconds:
        sentence += f", {duration(float(np.mean(seconds)))} each on average"
    titles = ("path", "step", "took", "size", "verified", "kept")
    known = [place for place in range(len(titles)) if any(row[place] for row in rows)]
    return section(
        title,
        paragraph(f"{sentence}. The newest first."),
        long_table(
            [titles[place] for place in known],
            [[row[place] for place in known] for row in rows],
            "checkpoints",
            right=("step", "took", "size"),
            wide=("path",),
        ),
    )


def _answer(event: RunEvent, key: str) -> str:
    value = event.fields.get(key)
    return {True: "yes", False: "no"}.get(value, "") if isinstance(value, bool) else ""


def _capsule_text(run: RunHistory, event: RunEvent) -> str:
    there = run.on_disk.get(event.text("path"))
    if there is None:
        return _answer(event, "kept")
    return "on disk" if there else "removed"


def data_position(run: RunHistory, numbers: RunNumbers) -> str:
    """For each start which steps, epochs and samples it has gone through, on how many ranks."""
    title = "Data"
    steps = run.steps
    if not run.has_steps:
        return ""
    if not (np.isfinite(steps.samples).any() or np.isfinite(steps.epoch).any()):
        return section(
            title, paragraph("Samples were not counted: pass the DataLoader to accelerator.prepare.")
        )
    rows = []
    seen = 0.0
    for attempt in numbers.attempts:
        mine = attempt.rows
        if not mine.any():
            continue
        counted = mine & steps.kept
        seen += float(np.nansum(steps.samples[counted]))
        step, epoch = steps.step[mine], steps.epoch[mine & np.isfinite(steps.epoch)]
        rows.append(
            (
                attempt.number,
                whole(attempt.world_size) if math.isfinite(attempt.world_size) else "",
                f"{whole(step[0])} to {whole(step[-1])}",
                f"{whole(epoch[0])} to {whole(epoch[-1])}" if len(epoch) else "",
                short(float(np.nansum(steps.samples[mine]))),
                short(float(np.nansum(steps.tokens[mine]))) if np.isfinite(steps.tokens[mine]).any() else "",
                whole(int((mine & ~steps.kept).sum())),
                short(seen),
            )
        )
    titles = (
        "start",
        "ranks",
        "steps",
        "epochs",
        "samples",
        "tokens",
        "done again later",
        "samples that count, so far",
    )
    sentences = [_went_on(event) for event in run.events if event.name == "loaded"]
    return section(
        title,
        long_table(titles, rows, "starts", right=titles),
        *(paragraph(sentence, "quiet") for sentence in sentences[-10:]),
    )


def _went_on(event: RunEvent) -> str:
    seen = event.number("samples_seen")
    facts = [
        event.text("path") or "a checkpoint",
        f"step {whole(event.step)}" if math.isfinite(event.step) else "",
        f"epoch {event.text('epoch')}" if event.text("epoch") else "",
        f"{whole(seen)} samples seen" if math.isfinite(seen) else "",
    ]
    return f"Start {event.attempt} went on from {', '.join(fact for fact in facts if fact)}."
