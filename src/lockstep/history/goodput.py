"""Goodput: how much of a run's time went into steps that count, over all of its starts; what the rest was lost to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.history.attempts import Attempt, attempts_of
from lockstep.history.columns import FloatArray
from lockstep.history.events import named
from lockstep.history.read import RunHistory

LOST = {
    "startup": "starting, until the first step",
    "loading": "loading a checkpoint",
    "data": "waiting for data",
    "saving": "saving",
    "waiting": "waiting for other ranks",
    "inference": "evaluation and other calls without gradients",
    "repeated": "steps that were done again",
    "between": "time outside of steps",
    "after": "work after the last step",
    "down": "no process between two starts",
}
LOST_IN_STEPS = {"save": "saving", "wait": "waiting", "inference": "inference", "data": "data"}
"""Parts of a step that train nothing, and what that is called."""


@dataclass(frozen=True)
class Goodput:
    """Seconds. Each one between the first start and the last sign of life is productive, or lost to one cause.

    Attributes:
        total: From the first start to the last thing that is known of the run.
        productive: In steps that count, without the parts that train nothing.
        lost: The rest, by cause: the keys of ``LOST``; causes that took no time are left out.
    """

    total: float
    productive: float
    lost: Mapping[str, float]

    @property
    def share(self) -> float:
        """0 to 1; NaN: nothing is known."""
        return self.productive / self.total if self.total > 0 else math.nan


def goodput_of(run: RunHistory, attempts: list[Attempt] | None = None) -> Goodput | None:
    """Measure the goodput; None where the files do not say when the run began. ``attempts``: those of the run, if they
    are at hand."""
    attempts = attempts_of(run) if attempts is None else attempts
    known = [one for one in attempts if math.isfinite(one.first)]
    if not known:
        return None
    lost = dict.fromkeys(LOST, 0.0)
    # Time up to now has been given out: where starts overlap nothing counts twice.
    productive, now = 0.0, known[0].first
    for attempt in known:
        lost["down"] += max(attempt.first - now, 0.0)
        now = max(now, attempt.first)
        steps = _AttemptSteps.of(run, attempt, now)
        if len(steps.took):
            startup = max(steps.began - now, 0.0)
            loading = min(_loading(attempt), startup)
            lost["loading"] += loading
            lost["startup"] += startup - loading
            now = steps.ended
        lost["between"] += steps.between
        lost["repeated"] += float(steps.took[~steps.kept].sum())
        left = steps.took[steps.kept]
        for part, cause in LOST_IN_STEPS.items():
            # Of what is left of a step, so that all causes add up to its seconds.
            share = np.minimum(np.nan_to_num(steps.parts[part][steps.kept]).clip(0), left)
            lost[cause] += float(share.sum())
            left = left - share
        productive += float(left.sum())
        lost["after" if len(steps.took) else "startup"] += max(attempt.last - now, 0.0)
        now = max(now, attempt.last)
    return Goodput(
        now - known[0].first, productive, {cause: seconds for cause, seconds in lost.items() if seconds > 0}
    )


@dataclass(frozen=True)
class _AttemptSteps:
    """Of one start: ``took``, the seconds of each step that belong to no step before it; when the first began and the
    last ended; seconds ``between`` them."""

    took: FloatArray
    kept: np.ndarray[tuple[int], np.dtype[np.bool_]]
    parts: Mapping[str, FloatArray]
    began: float
    ended: float
    between: float

    @classmethod
    def of(cls, run: RunHistory, attempt: Attempt, now: float) -> _AttemptSteps:
        rows = attempt.rows & np.isfinite(run.steps.time)
        ended = run.steps.time[rows]
        began = ended - np.nan_to_num(run.steps.total[rows]).clip(0)
        parts = {part: run.steps.parts[part][rows] for part in LOST_IN_STEPS}
        kept = run.steps.kept[rows]
        if not len(ended):
            return cls(ended, kept, parts, now, now, 0.0)
        first = max(now, float(began[0]))
        before = np.maximum.accumulate(np.append(first, ended))
        start = np.maximum(before[:-1], began)
        return cls(
            took=(ended - start).clip(0),
            kept=kept,
            parts=parts,
            began=first,
            ended=float(before[-1]),
            # What a step that begins late leaves, unless it ends before the one before it.
            between=float((np.minimum(start, before[1:]) - before[:-1]).sum()),
        )


def _loading(attempt: Attempt) -> float:
    # What is loaded in the middle of a step is a part of that one.
    loaded = [event for event in named(attempt.events, "loaded") if event.text("rollback") != "True"]
    seconds = [event.number("seconds") for event in loaded]
    return sum(one for one in seconds if one > 0)
