"""A run on the clock: its starts as bars, and what happened as marks, with a list of it below."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from lockstep.history.events import RunEvent
from lockstep.history.read import RunHistory
from lockstep.report.draw.charts import tick_labels
from lockstep.report.draw.html import long_table, safe
from lockstep.report.draw.scale import Scale
from lockstep.report.numbers import RunNumbers
from lockstep.words import bytes_text, date, duration, plain_text, whole

LANES = (
    ("checkpoints", ("checkpoint",), 2),
    ("restarts", ("restart", "loaded"), 0),
    ("hangs", ("hang",), 5),
    ("slow ranks", ("slow",), 7),
    ("spikes", ("spike", "capsule"), 3),
    ("damage", ("damage",), 6),
    ("errors, stops", ("error", "stop"), 5),
)
"""Title, names of events and colour of each row of marks."""
KNOWN = {"start", "end", "memory", "peak", "total"}.union(*(names for _, names, _ in LANES))
NOT_LISTED = ("checkpoint", "memory", "peak", "total")
OF_EVERY_EVENT = ("event", "time", "attempt", "step")
MOST_MARKS = 100


def picture(numbers: RunNumbers, run: RunHistory) -> str:
    """Empty, if no time is known."""
    if not numbers.last_time > numbers.first_time:
        return ""
    scale = Scale(0.0, numbers.last_time - numbers.first_time, "seconds")
    starts = []
    for attempt in numbers.attempts:
        if not math.isfinite(attempt.first):
            continue
        begin, end = (scale.place(time - numbers.first_time) for time in (attempt.first, attempt.last))
        ranks = f"{whole(attempt.world_size)} ranks" if math.isfinite(attempt.world_size) else ""
        title = (
            f"start {attempt.number}: {ranks or 'ranks not known'}, {duration(attempt.last - attempt.first)}"
        )
        starts.append(
            f'<i class="f{attempt.number % 2}" style="left:{100 * begin:.2f}%;width:{100 * (end - begin):.2f}%" '
            f'title="{safe(title)}"><em>{safe(ranks) if end - begin > 0.12 else ""}</em></i>'
        )
    lanes = [_lane("starts", "".join(starts[:MOST_MARKS]))]
    for title, names, colour in LANES:
        marked = [event for event in run.events if event.name in names and math.isfinite(event.time)]
        if marked:
            lanes.append(_lane(title, _marks(marked, scale, numbers.first_time, colour)))
    if own := [event for event in run.events if event.name not in KNOWN and math.isfinite(event.time)]:
        lanes.append(_lane("the script's", _marks(own, scale, numbers.first_time, 8)))
    ticks = tick_labels(scale.ticks(5), "left")
    lanes.append(f'<div class="lane x"><span></span><div class="x">{ticks}</div></div>')
    return f'<div class="time">{"".join(lanes)}</div>'


def _lane(title: str, inner: str) -> str:
    return f'<div class="lane"><span>{safe(title)}</span><div>{inner}</div></div>'


def _marks(events: Sequence[RunEvent], scale: Scale, begin: float, colour: int) -> str:
    # Of many, those at places of their own.
    places = {round(scale.place(event.time - begin), 3): event for event in events}
    return "".join(
        f'<i class="dot f{colour}" style="left:{100 * place:.1f}%" '
        f'title="{safe(event_text(event) or event.name, 120)}"></i>'
        for place, event in list(places.items())[:MOST_MARKS]
    )


def event_text(event: RunEvent) -> str:
    """One event in a phrase."""
    if event.name not in KNOWN:
        own = [
            f"{name}: {plain_text(value, 200)}"
            for name, value in event.fields.items()
            if name not in OF_EVERY_EVENT
        ]
        return plain_text(", ".join(own), 600)
    rank, step = event.number("rank"), event.step
    at = f"step {whole(step)}" if math.isfinite(step) else ""
    who = f"rank {whole(rank)}" if math.isfinite(rank) else ""
    who = "" if event.sentence.lower().startswith(who) else who
    facts = {
        "checkpoint": [event.text("path"), _bytes(event), _seconds(event)],
        "loaded": [event.text("path"), at],
        "capsule": [event.text("path")],
        "start": [f"{event.text('world_size')} ranks" if event.text("world_size") else "", event.text("parallel")],
        "restart": [f"with {event.text('world_size')} ranks" if event.text("world_size") else ""],
        "spike": [
            event.text("kind").replace("_", " "),
            f"value {event.text('value')}" if event.text("value") else "",
            event.text("action"),
            f"{len(event.items('skipped'))} batches skipped" if event.items("skipped") else "",
            f"capsule {event.text('capsule')}" if event.text("capsule") else "",
        ],
    }.get(event.name, [who])  # fmt: skip
    return plain_text(", ".join(one for one in [*facts, event.sentence] if one), 600)


def _bytes(event: RunEvent) -> str:
    return bytes_text(event.number("bytes")) if math.isfinite(event.number("bytes")) else ""


def _seconds(event: RunEvent) -> str:
    return duration(event.number("seconds")) if math.isfinite(event.number("seconds")) else ""


def listing(events: Iterable[RunEvent], begin: float) -> str:
    """What happened, in order, without the checkpoints. ``begin``: when the run did."""
    rows = [
        (
            f"+{duration(event.time - begin)}" if math.isfinite(event.time - begin) else "",
            plain_text(event.name, 60),
            event_text(event),
            whole(event.step) if math.isfinite(event.step) else "",
            event.attempt,
            date(event.time) if math.isfinite(event.time) else "",
        )
        for event in events
        if event.name not in NOT_LISTED
    ]
    if not rows:
        return ""
    titles = ("after", "event", "what", "step", "start", "time")
    return long_table(titles, rows, "events", right=("after", "step", "start", "time"), wide=("what",))
