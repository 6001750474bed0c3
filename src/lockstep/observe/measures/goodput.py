"""Goodput: how much of a run's time went into steps that count, over all of its attempts; what the rest was lost to.

Pure: from the lines of a run's folder. Every second between the start of the first attempt and the last thing that is
known belongs to exactly one of ``productive`` and the losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

LOST_IN_STEPS = {"save": "saving", "wait": "waiting", "inference": "inference", "data": "data"}
"""Parts of a step that train nothing, and what that is called."""


@dataclass(frozen=True)
class Goodput:
    """Seconds.

    Attributes:
        total: From the start of the first attempt to the last thing that is known of the run.
        productive: In steps that count, without the parts that train nothing.
        lost: The rest, by cause: ``startup`` (from a process's start to its first step), ``down`` (between attempts),
            ``repeated`` (steps that a later attempt made again), ``loading``, ``after`` (behind an attempt's last
            step), ``between`` (what lies between steps), and of steps that count ``data``, ``saving``, ``waiting``,
            ``inference``.
    """

    total: float
    productive: float
    lost: Mapping[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """0 to 1."""
        return self.productive / self.total if self.total > 0 else 0.0


@dataclass
class _Attempt:
    start: float
    end: float
    steps: list[tuple[int, float, float, Mapping[str, float]]] = field(default_factory=list)
    loading: float = 0.0


def goodput(events: Iterable[Mapping[str, Any]], steps: Iterable[Mapping[str, Any]]) -> Goodput:
    """Of the lines of ``events.jsonl`` and ``measures.jsonl``, in the order of the files; unknown ones are skipped."""
    attempts: dict[int, _Attempt] = {}
    for line in events:
        _take_event(attempts, line)
    for line in steps:
        _take_step(attempts, line)
    ordered = [attempts[number] for number in sorted(attempts)]
    if not ordered:
        return Goodput(0.0, 0.0)
    lost: dict[str, float] = {}
    productive, now = 0.0, ordered[0].start

    def lose(cause: str, seconds: float) -> None:
        if seconds > 0:
            lost[cause] = lost.get(cause, 0.0) + seconds

    for number, attempt in enumerate(ordered):
        made_again = min(
            (step for later in ordered[number + 1 :] for step, *_ in later.steps), default=float("inf")
        )
        lose("down", attempt.start - now)
        now = max(now, attempt.start)
        if attempt.steps:
            first = max(now, attempt.steps[0][1])
            loading = min(attempt.loading, first - now)
            lose("loading", loading)
            lose("startup", first - now - loading)
            now = first
        for step, began, ended, seconds in attempt.steps:
            lose("between", began - now)
            took = max(0.0, ended - max(now, began))
            now = max(now, ended)
            if step >= made_again:
                lose("repeated", took)
                continue
            idle = 0.0
            for part, cause in LOST_IN_STEPS.items():
                share = min(seconds.get(part, 0.0), took - idle)
                lose(cause, share)
                idle += max(0.0, share)
            productive += took - idle
        lose("after" if attempt.steps else "startup", attempt.end - now)
        now = max(now, attempt.end)
    return Goodput(now - ordered[0].start, productive, dict(sorted(lost.items())))


def _take_event(attempts: dict[int, _Attempt], line: Mapping[str, Any]) -> None:
    moment, number = _number(line.get("time")), line.get("attempt", 0)
    if moment is None or not isinstance(number, int):
        return
    if line.get("event") == "start":
        attempts.setdefault(number, _Attempt(moment, moment)).start = moment
    attempt = attempts.get(number)
    if attempt is None:
        return
    attempt.end = max(attempt.end, moment)
    if line.get("event") == "loaded":
        attempt.loading += _number(line.get("seconds")) or 0.0


def _take_step(attempts: dict[int, _Attempt], line: Mapping[str, Any]) -> None:
    ended, number, step = _number(line.get("time")), line.get("attempt", 0), line.get("step")
    if ended is None or not isinstance(number, int) or not isinstance(step, int):
        return
    seconds = line.get("seconds")
    known = {}
    if isinstance(seconds, Mapping):
        known = {str(part): value for part, one in seconds.items() if (value := _number(one)) is not None}
    began = ended - known.get("total", 0.0)
    attempt = attempts.setdefault(number, _Attempt(began, ended))
    attempt.steps.append((step, began, ended, known))
    attempt.end = max(attempt.end, ended)


def _number(value: object) -> float | None:
    """A finite number that is 0 or more."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        return None
    return float(value)
