"""A launch that runs, as its coordinator tells of it: values from a message, whatever that may hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.history.columns import bounded
from lockstep.words import plain_text

MOST_RANKS = 512
MOST_SENTENCES = 20


@dataclass(frozen=True)
class RankNow:
    """One rank. Seconds: ``still`` since it got anything done, ``silent`` since it was heard of, ``own`` of a step
    without waits for others. ``part``: of a step that it is in. ``ended``: how, or ""."""

    rank: int
    host: str
    pid: int
    steps: float
    part: str
    still: float
    silent: float
    own: float
    is_slow: bool
    ended: str


@dataclass(frozen=True)
class RankStack:
    """What a rank was doing when it was asked: the innermost line of the script, and its Python stack."""

    rank: int
    host: str
    pid: int
    place: str
    stack: str


@dataclass(frozen=True)
class JobNow:
    """How a launch stands. ``latest``: numbers of the run by name; ``sentences``: what was said of it, with times."""

    run: str
    elapsed: float
    latest: Mapping[str, float]
    ranks: tuple[RankNow, ...]
    sentences: tuple[tuple[float, str], ...]

    def number(self, name: str) -> float:
        """One of ``latest``; NaN: not known."""
        return self.latest.get(name, math.nan)


def job_of(message: Mapping[str, object]) -> JobNow:
    """What is not as it should be is left out."""
    latest = message.get("latest")
    return JobNow(
        run=_text(message.get("run"), 200),
        elapsed=bounded(message.get("elapsed_s")),
        latest={
            plain_text(name, 60): _finite_number(value)
            for name, value in (latest.items() if isinstance(latest, Mapping) else ())
        },
        ranks=tuple(_rank(one) for one in _objects(message.get("ranks"))[:MOST_RANKS]),
        sentences=tuple(
            (bounded(one.get("time")), _text(one.get("sentence"), 300))
            for one in _objects(message.get("sentences"))[-MOST_SENTENCES:]
        ),
    )


def stack_of(message: Mapping[str, object]) -> RankStack:
    """The lines of the stack stay lines."""
    lines = message.get("stack")
    kept = lines.splitlines()[-200:] if isinstance(lines, str) else []
    return RankStack(
        rank=_whole_number(message.get("rank")),
        host=_text(message.get("host"), 100),
        pid=_whole_number(message.get("pid")),
        place=_text(message.get("place"), 300),
        stack="\n".join(_line(line) for line in kept),
    )


def _rank(one: Mapping[str, object]) -> RankNow:
    return RankNow(
        rank=_whole_number(one.get("rank")),
        host=_text(one.get("host"), 60),
        pid=_whole_number(one.get("pid")),
        steps=bounded(one.get("steps")),
        part=_text(one.get("part"), 40),
        still=bounded(one.get("still_s")),
        silent=bounded(one.get("silent_s")),
        own=bounded(one.get("own_s")),
        is_slow=one.get("is_slow") is True,
        ended=_text(one.get("ended"), 100),
    )


def _objects(value: object) -> list[Mapping[str, object]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _finite_number(value: object) -> float:
    if value in ("nan", "inf", "-inf"):
        return float(str(value))
    return bounded(value)


def _whole_number(value: object) -> int:
    number = bounded(value)
    return int(number) if math.isfinite(number) else -1


def _text(value: object, limit: int) -> str:
    return "" if value is None else plain_text(value, limit)


def _line(line: str) -> str:
    """With its indentation."""
    rest = line.lstrip(" ")
    return " " * min(len(line) - len(rest), 40) + plain_text(rest, 300)
