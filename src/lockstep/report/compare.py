"""Several runs beside each other: what was set differently, and at which step their numbers part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.config.values import plain
from lockstep.errors import ConfigError
from lockstep.history.columns import FloatArray, IndexArray
from lockstep.history.events import RunEvent, configuration, environment, named
from lockstep.history.read import RunHistory
from lockstep.words import count, digits, percent, plain_text, two_digits, whole

MOST_RUNS = 8
QUANTITIES = (("samples", "the number of samples"), ("tokens", "the number of tokens"), ("loss", "the loss"),
              ("gradient_norm", "the gradient norm"), ("learning_rate", "the learning rate"))  # fmt: skip
"""In the order in which a step computes them."""
IN_PERCENT = 0.001
"""Relative distances from here on are written in percent."""


@dataclass(frozen=True)
class SettingDifference:
    """One setting, with its (value, source) in each run; empty where a run does not name it."""

    name: str
    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class NumbersPart:
    """Where the numbers of a run part from those of the first one.

    ``common``: steps that both have. ``equal``: so many of the first of them are the same. ``step``: the first at which
    ``quantity`` differs, with its two ``values``; NaN: none does. ``distance``: the greatest relative distance of the
    losses, at step ``farthest``.
    """

    common: int
    equal: int
    step: float
    quantity: str
    values: tuple[float, float]
    distance: float
    farthest: float


def check_count(runs: Sequence[object]) -> None:
    """Raise ConfigError for more runs than a chart can show."""
    if len(runs) > MOST_RUNS:
        raise ConfigError(
            f"{len(runs)} runs do not fit into one chart. Compare at most {MOST_RUNS} runs at once."
        )


def settings_that_differ(runs: Sequence[RunHistory]) -> list[SettingDifference]:
    """Settings first, in the order of the first run, then what the machines and versions say."""
    starts = [_last_start(run) for run in runs]
    settings = [{name: (value, source) for name, value, source in configuration(one)} for one in starts]
    machines = [
        {name: (value, "") for name, value in environment(one)} | _ranks(run)
        for run, one in zip(runs, starts, strict=True)
    ]
    found = []
    for tables in (settings, machines):
        for name in dict.fromkeys(name for table in tables for name in table):
            values = tuple(table.get(name, ("", "")) for table in tables)
            if len({value for value, _ in values}) > 1:
                found.append(SettingDifference(name, values))
    return found


def _ranks(run: RunHistory) -> dict[str, tuple[str, str]]:
    """The numbers of ranks that the run had, one after the other."""
    sizes = [event.text("world_size") for event in named(run.events, "start")]
    changes = [size for size, before in zip(sizes, ["", *sizes], strict=False) if size != before]
    return {"ranks": (", then ".join(changes[:20]), "")} if changes else {}


def _last_start(run: RunHistory) -> RunEvent | None:
    return next(reversed(named(run.events, "start")), None)


def numbers_part(first: RunHistory, other: RunHistory) -> NumbersPart:
    """Compared are the values as they were written, step by step, of the steps that count."""
    steps, mine, theirs = _common(first, other)
    found: tuple[float, str, tuple[float, float]] = (math.nan, "", (math.nan, math.nan))
    equal = np.ones(len(steps), dtype=bool)
    for name, words in QUANTITIES:
        here, there = getattr(first.steps, name)[mine], getattr(other.steps, name)[theirs]
        differs = (here != there) & ~(np.isnan(here) | np.isnan(there))
        equal &= ~differs
        if differs.any():
            place = int(np.argmax(differs))
            # NaN at first, of which no comparison is true; of several at one step the first stays.
            if not steps[place] >= found[0]:
                found = (float(steps[place]), words, (float(here[place]), float(there[place])))
    distances = relative(first.steps.loss[mine], other.steps.loss[theirs])
    known = np.isfinite(distances)
    farthest = int(np.argmax(np.where(known, distances, -1.0))) if known.any() else -1
    return NumbersPart(
        common=len(steps),
        equal=int(np.argmin(equal)) if len(steps) and not equal.all() else len(steps),
        step=found[0],
        quantity=found[1],
        values=found[2],
        distance=float(distances[farthest]) if farthest >= 0 else math.nan,
        farthest=float(steps[farthest]) if farthest >= 0 else math.nan,
    )


def distances(first: RunHistory, other: RunHistory) -> tuple[FloatArray, FloatArray]:
    """(step, relative distance of the losses) of the steps that both runs have."""
    steps, mine, theirs = _common(first, other)
    return steps, relative(first.steps.loss[mine], other.steps.loss[theirs])


def relative(here: FloatArray, there: FloatArray) -> FloatArray:
    """How far two values are apart, in parts of the larger one."""
    larger = np.maximum(np.abs(here), np.abs(there))
    return np.abs(here - there) / np.where(larger > 0, larger, 1.0)


def _common(first: RunHistory, other: RunHistory) -> tuple[FloatArray, IndexArray, IndexArray]:
    """Steps that both have, and the row of each in both."""
    mine, theirs = np.flatnonzero(first.steps.kept), np.flatnonzero(other.steps.kept)
    steps, at_mine, at_theirs = np.intersect1d(
        first.steps.step[mine], other.steps.step[theirs], return_indices=True
    )
    return steps, mine[at_mine], theirs[at_theirs]


def comparison_sentences(runs: Sequence[RunHistory], names: Sequence[str]) -> list[str]:
    """What differs first in the settings, and in the numbers of each run against the first one."""
    differing = settings_that_differ(runs)
    if differing:
        one = differing[0]
        values = ", ".join(
            f"{plain_text(value, 60) or 'not set'} in {name}"
            for (value, _), name in zip(one.values, names, strict=True)
        )
        sentences = [f"The first setting that differs is {plain_text(one.name, 60)}: {values}."]
        if len(differing) > 1:
            sentences[0] += f" {count(len(differing) - 1, 'more entry differs', 'more entries differ')}."
    elif all(_last_start(run) for run in runs):
        sentences = ["All settings that were written are the same."]
    else:
        sentences = ["How the runs were set up was not written for all of them."]
    return sentences + [
        _numbers_sentence(numbers_part(runs[0], run), names[0], name)
        for run, name in zip(runs[1:], names[1:], strict=True)
    ]


def _numbers_sentence(part: NumbersPart, first: str, other: str) -> str:
    both = f"{first} and {other}"
    if not part.common:
        return f"{both} have no step in common."
    if math.isnan(part.step):
        return f"{both} have the same numbers in {count(part.common, 'common step')}."
    here, there = part.values
    apart = float(relative(np.array([here]), np.array([there]))[0])
    sentence = (
        f"{both} part at step {whole(part.step)}: {part.quantity} is {digits(here, 6)} and {digits(there, 6)} "
        f"(apart by {_apart(apart)})"
    )
    sentence += f"; {count(part.equal, 'step')} before that are the same." if part.equal else "."
    if math.isfinite(part.distance) and part.distance > 0:
        sentence += (
            f" The losses are farthest apart at step {whole(part.farthest)}: by {_apart(part.distance)}."
        )
    return sentence


def _apart(distance: float) -> str:
    return percent(distance) if distance >= IN_PERCENT else f"{two_digits(distance)} of the value"


def told_apart(runs: Sequence[RunHistory]) -> list[str]:
    """A name for each run; with its number where two have the same."""
    names = [run.name for run in runs]
    return [
        plain(name, 60) if names.count(name) == 1 else f"{plain(name, 50)} ({place})"
        for place, name in enumerate(names, start=1)
    ]
