"""The starts of a run, one after the other, and how the last one ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from lockstep.history.columns import BoolArray
from lockstep.history.events import RunEvent, named
from lockstep.history.read import RunHistory

PATIENCE_S = 120.0
"""A run of which nothing was heard for so long, and for ``PATIENT_STEPS`` of its steps, does not run any more."""
PATIENT_STEPS = 20
BACKGROUND = ("checkpoint", "capsule")
"""Events that a thread may write after what ended the run."""


@dataclass(frozen=True)
class Attempt:
    """One start of the run. ``rows``: which of the steps are its own. ``first``, ``last``: its first and last sign of
    life, in seconds since 1970. ``started``: the event that says how; None if that line is missing."""

    number: int
    started: RunEvent | None
    rows: BoolArray
    first: float
    last: float
    events: tuple[RunEvent, ...]

    @property
    def world_size(self) -> float:
        return self.started.number("world_size") if self.started else math.nan

    @property
    def peak_flops(self) -> float:
        """Of all its devices in a second; that of one may be measured late, and then has an event of its own."""
        reported = [event.number("peak_flops") for event in named(self.events, "start", "peak")]
        known = [peak for peak in reported if math.isfinite(peak)]
        return known[-1] * self.world_size if known else math.nan


class RunStatus(Enum):
    """How a run stands, with the word that people read."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    HANGS = "stands still"
    HUNG = "hung"
    RUNNING = "running"
    SILENT = "ended without a word"
    EMPTY = "no step yet"


def attempts_of(run: RunHistory) -> list[Attempt]:
    """Return the attempts in the order of their numbers."""
    steps = run.steps
    every = {int(number) for number in np.unique(steps.attempt)} | {event.attempt for event in run.events}
    found = []
    for number in sorted(every):
        rows = steps.attempt == number
        events = tuple(event for event in run.events if event.attempt == number)
        # A line has the time of its step's end.
        begun = steps.time[rows] - np.nan_to_num(steps.total[rows])
        signs = [*begun[:1], *steps.time[rows][-1:], *(event.time for event in events)]
        known = [sign for sign in signs if math.isfinite(sign)]
        starts = named(events, "start")
        found.append(
            Attempt(
                number=number,
                started=starts[-1] if starts else None,
                rows=rows,
                first=min(known, default=math.nan),
                last=max(known, default=math.nan),
                events=events,
            )
        )
    return found


def status_of(run: RunHistory, attempts: list[Attempt], now: float) -> tuple[RunStatus, RunEvent | None]:
    """Return how the run stands at ``now`` (seconds since 1970), and the event that says so, if one does."""
    if not attempts:
        return RunStatus.EMPTY, None
    last = attempts[-1]
    stepped = run.steps.time[last.rows][-1:]
    # What came before the last step has not ended the run.
    after = [
        event
        for event in last.events
        if event.name not in BACKGROUND and not (len(stepped) and event.time < stepped[-1])
    ]
    # What ended it says why, whatever else was noted on the way out.
    ends = {
        "error": RunStatus.FAILED,
        "damage": RunStatus.FAILED,
        "stop": RunStatus.STOPPED,
        "hang": RunStatus.HANGS,
        "end": RunStatus.FINISHED,
    }
    endings = {event.name: event for event in reversed(after) if event.name in ends}
    if "hang" in endings and "end" in endings and endings["end"].text("reason") == "hang":
        return RunStatus.HUNG, endings["hang"]
    for name in ("error", "stop", "end", "hang", "damage"):
        # Some runs go on after damage: it ended those of which nothing more was heard.
        if name == "damage" and not is_silent(run, last, now):
            continue
        if name in endings:
            return ends[name], endings[name]
    if not is_silent(run, last, now):
        return (RunStatus.RUNNING if run.has_steps else RunStatus.EMPTY), None
    return RunStatus.SILENT, None


def is_silent(run: RunHistory, last: Attempt, now: float) -> bool:
    """Return whether nothing was heard for longer than a running one would let pass."""
    times = run.steps.total[run.steps.kept]
    times = times[np.isfinite(times)]
    usual = float(np.median(times)) if len(times) else 0.0
    # A sign that is not known (NaN) is silence.
    return not now - last.last <= max(PATIENCE_S, PATIENT_STEPS * usual)
