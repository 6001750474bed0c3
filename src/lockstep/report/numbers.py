"""The numbers of a run: what sentences, tables and JSON are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.history.attempts import Attempt, RunStatus, attempts_of, status_of
from lockstep.history.columns import PARTS, BoolArray, FloatArray
from lockstep.history.events import RunEvent, named
from lockstep.history.goodput import Goodput, goodput_of
from lockstep.history.read import RunHistory

SLOW_RANK = 1.15
"""A rank is slow if its own work takes so many times that of the median rank,"""
WORTH_WAITING = 0.05
"""and so long beyond it, in parts of a step."""


@dataclass(frozen=True)
class Curve:
    """Of one quantity over the steps that count. ``not_finite``: steps at which it was written and is no finite number,
    and ``first_not_finite`` the first of them."""

    first: float
    last: float
    least: float
    least_step: float
    greatest: float
    greatest_step: float
    not_finite: int
    first_not_finite: float


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step. ``low``, ``high``, ``worst``: one in ten is below, one in ten above, one in a hundred above.
    ``early`` and ``late``: medians of the first and of the last fifth of the steps on as many ranks as the last one.
    ``shares``: of the whole time, by ``columns.PARTS``."""

    mean: float
    median: float
    low: float
    high: float
    worst: float
    early: float
    late: float
    count: int
    shares: Mapping[str, float]


@dataclass(frozen=True)
class RunNumbers:
    """All of a run; NaN and None: not known.

    ``steps``: optimizer steps that count, ``again``: those that were done and thrown away. ``total_steps``: of the
    whole training, if the script has said it. ``tokens_missing``: steps of which tokens are not known.
    ``peak_memory``: bytes. ``slow_ranks``: how many times the median rank's time each of them takes.
    ``recomputation``: FLOPs that the hardware does for each one of the model. ``peak_share``: of the accelerators' peak
    (MFU), ``hardware_share`` with what is computed twice (HFU).
    """

    status: RunStatus
    ended_by: RunEvent | None
    attempts: tuple[Attempt, ...]
    first_time: float
    last_time: float
    goodput: Goodput | None
    steps: int
    again: int
    first_step: float
    last_step: float
    total_steps: float
    samples: float
    tokens: float
    tokens_missing: int
    epoch: float
    loss: Curve | None
    gradient_norm: Curve | None
    step_times: StepTimes | None
    samples_per_second: float
    tokens_per_second: float
    model_flops_per_second: float
    peak_share: float
    hardware_share: float
    recomputation: float
    peak_memory: float
    rank_seconds: tuple[float, ...]
    slow_ranks: Mapping[int, float]
    checkpoints: tuple[RunEvent, ...]
    hangs: tuple[RunEvent, ...]
    damage: tuple[RunEvent, ...]
    spikes: tuple[RunEvent, ...]
    skipped: int

    @property
    def seconds_left(self) -> float:
        """Of the steps that the script has said there are, at the usual time of a step; NaN: not known."""
        usual = self.step_times.median if self.step_times is not None else math.nan
        return max(self.total_steps - self.last_step, 0.0) * usual

    @property
    def started(self) -> RunEvent | None:
        """How the run started last."""
        return next((one.started for one in reversed(self.attempts) if one.started), None)

    @property
    def world_sizes(self) -> list[int]:
        """One after the other, without repeats."""
        sizes = [int(one.world_size) for one in self.attempts if math.isfinite(one.world_size)]
        return [size for place, size in enumerate(sizes) if not place or sizes[place - 1] != size]


def numbers_of(run: RunHistory, now: float) -> RunNumbers:
    """Compute the numbers of a run; ``now``: seconds since 1970, by which a run that goes on is told from one that fell
    silent."""
    attempts = attempts_of(run)
    status, ended_by = status_of(run, attempts, now)
    steps, kept = run.steps, run.steps.kept
    both = kept & np.isfinite(steps.model_flops)
    epochs = steps.epoch[kept & np.isfinite(steps.epoch)]
    rank_seconds = _rank_seconds(run, attempts)
    step_times = _step_times(run, attempts, kept)
    spikes = named(run.events, "spike")
    known = [one for one in attempts if math.isfinite(one.first)]
    kept_steps = steps.step[kept]
    return RunNumbers(
        status=status,
        ended_by=ended_by,
        attempts=tuple(attempts),
        first_time=min((one.first for one in known), default=math.nan),
        last_time=max((one.last for one in known), default=math.nan),
        goodput=goodput_of(run, attempts),
        steps=int(kept.sum()),
        again=int((~kept).sum()),
        first_step=float(kept_steps[0]) if len(kept_steps) else math.nan,
        last_step=float(kept_steps[-1]) if len(kept_steps) else math.nan,
        total_steps=next((one.number("steps") for one in reversed(named(run.events, "total"))), math.nan),
        samples=float(np.nansum(steps.samples[kept])),
        tokens=float(np.nansum(steps.tokens[kept])),
        tokens_missing=int(np.isnan(steps.tokens[kept]).sum()),
        epoch=float(epochs[-1]) if len(epochs) else math.nan,
        loss=_curve(steps.step, steps.loss, kept & steps.written["loss"]),
        gradient_norm=_curve(steps.step, steps.gradient_norm, kept & steps.written["gradient_norm"]),
        step_times=step_times,
        samples_per_second=_rate(steps.samples, steps.total, kept),
        tokens_per_second=_rate(steps.tokens, steps.total, kept),
        model_flops_per_second=_rate(steps.model_flops, steps.total, kept),
        peak_share=_share_of_peak(run, attempts, steps.model_flops),
        hardware_share=_share_of_peak(run, attempts, steps.hardware_flops),
        recomputation=_ratio(
            float(np.nansum(steps.hardware_flops[both])), float(np.nansum(steps.model_flops[both]))
        ),
        peak_memory=max(steps.memory["peak"].values, default=math.nan)
        if "peak" in steps.memory
        else math.nan,
        rank_seconds=rank_seconds,
        slow_ranks=_slow(rank_seconds, step_times),
        checkpoints=tuple(named(run.events, "checkpoint")),
        hangs=tuple(named(run.events, "hang")),
        damage=tuple(named(run.events, "damage")),
        spikes=tuple(spikes),
        skipped=sum(len(event.items("skipped")) for event in spikes),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 and part > 0 else math.nan


def _rate(amount: FloatArray, seconds: FloatArray, rows: BoolArray) -> float:
    """Return a second, over the steps of which the amount is known."""
    known = rows & np.isfinite(amount) & np.isfinite(seconds)
    return _ratio(float(amount[known].sum()), float(seconds[known].sum()))


def _share_of_peak(run: RunHistory, attempts: list[Attempt], flops: FloatArray) -> float:
    """Return the share of the FLOPs that all devices could have done in the steps of which they are known."""
    rows = run.steps.kept & np.isfinite(flops) & np.isfinite(run.steps.total)
    # FLOPs that were there: seconds of a start's steps, times FLOPs a second of all its devices.
    capacity = sum(
        float(run.steps.total[rows & attempt.rows].sum()) * attempt.peak_flops
        for attempt in attempts
        if (rows & attempt.rows).any()
    )
    return _ratio(float(flops[rows].sum()), capacity)


def _curve(step: FloatArray, values: FloatArray, rows: BoolArray) -> Curve | None:
    if not rows.any():
        return None
    step, values = step[rows], values[rows]
    finite = np.isfinite(values)
    broken = step[~finite]
    if not finite.any():
        unknown = (math.nan,) * 6
        return Curve(*unknown, not_finite=len(broken), first_not_finite=float(broken[0]))
    at, known = step[finite], values[finite]
    least, greatest = int(known.argmin()), int(known.argmax())
    return Curve(
        first=float(known[0]),
        last=float(known[-1]),
        least=float(known[least]),
        least_step=float(at[least]),
        greatest=float(known[greatest]),
        greatest_step=float(at[greatest]),
        not_finite=len(broken),
        first_not_finite=float(broken[0]) if len(broken) else math.nan,
    )


def _step_times(run: RunHistory, attempts: list[Attempt], kept: BoolArray) -> StepTimes | None:
    steps = run.steps
    rows = kept & np.isfinite(steps.total)
    if not rows.any():
        return None
    total = steps.total[rows]
    whole = float(total.sum())
    alike = steps.total[rows & _like_last(attempts)]
    fifth = max(len(alike) // 5, 1)
    sums = {part: float(np.nansum(steps.parts[part][rows])) for part in PARTS}
    low, median, high, worst = (float(one) for one in np.percentile(total, (10, 50, 90, 99)))
    return StepTimes(
        mean=whole / len(total),
        median=median,
        low=low,
        high=high,
        worst=worst,
        early=float(np.median(alike[:fifth])),
        late=float(np.median(alike[-fifth:])),
        count=len(total),
        shares={part: value / whole for part, value in sums.items() if value > 0} if whole > 0 else {},
    )


def _like_last(attempts: list[Attempt]) -> BoolArray:
    """Rows of the starts that had as many ranks as the last that made a step."""
    stepped = [one for one in attempts if one.rows.any()]
    sizes = [str(one.world_size) for one in stepped]
    rows = [one.rows for one, size in zip(stepped, sizes, strict=True) if size == sizes[-1]]
    return np.logical_or.reduce(rows)


def _rank_seconds(run: RunHistory, attempts: list[Attempt]) -> tuple[float, ...]:
    """Mean time of a step of each rank, of the world that the run had last."""
    times = run.steps.rank_times
    if not times:
        return ()
    sizes = [int(one.world_size) for one in attempts if math.isfinite(one.world_size)]
    size = next((one for one in reversed(sizes) if one in times), max(times))
    return tuple(float(one) for one in times[size].means)


def _slow(seconds: tuple[float, ...], times: StepTimes | None) -> dict[int, float]:
    known = [one for one in seconds if math.isfinite(one) and one > 0]
    if len(known) < 2:
        return {}
    # The lower median, so that of two ranks the slower one is slow.
    usual = sorted(known)[(len(known) - 1) // 2]
    limit = max(SLOW_RANK * usual, usual + WORTH_WAITING * (times.median if times is not None else 0.0))
    return {rank: one / usual for rank, one in enumerate(seconds) if one > limit}
