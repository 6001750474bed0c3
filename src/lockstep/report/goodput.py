"""Of the time that a run took on the clock, how much made it go on, and what the rest was lost to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.report.attempts import Attempt
from lockstep.report.columns import BoolArray, FloatArray
from lockstep.report.read import RunHistory

LOST = {
    "start": "starting, until the first step",
    "data": "waiting for data",
    "save": "saving",
    "wait": "waiting for other ranks",
    "again": "steps that were done again",
    "between": "time outside of steps",
    "after": "what came after the last step",
    "down": "no process between two starts",
}


@dataclass(frozen=True)
class WallTime:
    """Seconds on the clock from the first start to the last sign of life. ``lost``: by the keys of ``LOST``."""

    wall: float
    productive: float
    lost: Mapping[str, float]

    @property
    def goodput(self) -> float:
        """The share of the wall time in which steps that count were computed."""
        return self.productive / self.wall if self.wall > 0 else math.nan


def wall_time(run: RunHistory, attempts: list[Attempt]) -> WallTime | None:
    """None where the files do not say when the run began or what its steps took."""
    known = [attempt for attempt in attempts if math.isfinite(attempt.first)]
    steps = run.steps
    if not known or not np.isfinite(steps.total).any():
        return None
    lost = dict.fromkeys(LOST, 0.0)
    productive = 0.0
    for attempt in known:
        kept, again = attempt.rows & steps.kept, attempt.rows & ~steps.kept
        for part in ("data", "save", "wait"):
            lost[part] += _sum(steps.parts[part], kept)
        productive += _sum(steps.total, kept) - sum(
            _sum(steps.parts[part], kept) for part in ("data", "save", "wait")
        )
        lost["again"] += _sum(steps.total, again)
        times, totals = steps.time[attempt.rows], np.nan_to_num(steps.total[attempt.rows])
        if not len(times) or not np.isfinite(times[[0, -1]]).all():
            lost["start"] += attempt.last - attempt.first
            continue
        begins = times[0] - totals[0]
        lost["start"] += max(begins - attempt.first, 0)
        lost["between"] += max(times[-1] - begins - totals.sum(), 0)
        lost["after"] += max(attempt.last - times[-1], 0)
    for before, after in itertools.pairwise(known):
        lost["down"] += max(after.first - before.last, 0)
    wall = max(attempt.last for attempt in known) - known[0].first
    return WallTime(wall, max(productive, 0.0), {name: value for name, value in lost.items() if value > 0})


def _sum(values: FloatArray, rows: BoolArray) -> float:
    return float(np.nansum(values[rows]))
