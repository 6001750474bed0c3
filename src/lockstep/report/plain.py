"""A run's numbers as values that JSON has."""

from __future__ import annotations

import math

from lockstep.history.columns import number
from lockstep.report.numbers import Curve, RunNumbers


def to_json(numbers: RunNumbers) -> dict[str, object]:
    """With plain values only; what is not known is null.

    ``status``, ``started``, ``last_sign`` (seconds since 1970), ``starts``, ``world_sizes``, ``steps``,
    ``steps_again``, ``first_step``, ``last_step``, ``total_steps``, ``seconds_left``, ``samples``, ``tokens``,
    ``epoch``, ``loss``, ``gradient_norm``, ``step_seconds``, ``shares`` (of a step's time), ``device_shares``,
    ``hidden_communication_share``, ``samples_per_second``, ``tokens_per_second``, ``model_flops_per_second``,
    ``mfu``, ``hfu``, ``recomputation``, ``wall_seconds``, ``goodput``, ``lost_seconds``, ``memory_bytes``,
    ``memory_expected_bytes``, ``bytes_per_step``, ``bytes_per_step_expected``, ``rank_seconds``, ``slow_ranks``,
    ``checkpoints``, ``hangs``, ``damage``, ``spikes``, ``batches_skipped``.
    """
    times, wall = numbers.step_times, numbers.goodput
    return {
        "status": numbers.status.value,
        "started": _json(numbers.first_time),
        "last_sign": _json(numbers.last_time),
        "starts": len(numbers.attempts),
        "world_sizes": numbers.world_sizes,
        "steps": numbers.steps,
        "steps_again": numbers.again,
        "first_step": _json(numbers.first_step),
        "last_step": _json(numbers.last_step),
        "total_steps": _json(numbers.total_steps),
        "seconds_left": _json(numbers.seconds_left),
        "samples": _json(numbers.samples),
        "tokens": _json(numbers.tokens),
        "epoch": _json(numbers.epoch),
        "loss": _curve_json(numbers.loss),
        "gradient_norm": _curve_json(numbers.gradient_norm),
        "step_seconds": None if times is None else {
            name: _json(getattr(times, name)) for name in ("mean", "median", "low", "high", "worst", "early", "late")
        },
        "shares": {} if times is None else {part: _json(share) for part, share in times.shares.items()},
        "device_shares": {} if times is None else {part: _json(share) for part, share in times.device_shares.items()},
        "hidden_communication_share": None if times is None else _json(times.hidden_share),
        "samples_per_second": _json(numbers.samples_per_second),
        "tokens_per_second": _json(numbers.tokens_per_second),
        "model_flops_per_second": _json(numbers.model_flops_per_second),
        "mfu": _json(numbers.peak_share),
        "hfu": _json(numbers.hardware_share),
        "recomputation": _json(numbers.recomputation),
        "wall_seconds": None if wall is None else _json(wall.total),
        "goodput": None if wall is None else _json(wall.share),
        "lost_seconds": {} if wall is None else {name: _json(value) for name, value in wall.lost.items()},
        "memory_bytes": {name: _json(value) for name, value in numbers.memory.items()},
        "memory_expected_bytes": dict(numbers.memory_expected),
        "bytes_per_step": {axis: _json(value) for axis, value in numbers.bytes_per_step.items()},
        "bytes_per_step_expected": _json(numbers.bytes_expected),
        "rank_seconds": [_json(one) for one in numbers.rank_seconds],
        "slow_ranks": {str(rank): _json(factor) for rank, factor in numbers.slow_ranks.items()},
        "checkpoints": len(numbers.checkpoints),
        "hangs": [event.sentence for event in numbers.hangs],
        "damage": [event.sentence for event in numbers.damage],
        "spikes": len(numbers.spikes),
        "batches_skipped": numbers.skipped,
    }  # fmt: skip


def _json(value: float) -> float | None:
    """None for what JSON has no number for."""
    value = number(value)
    return value if math.isfinite(value) else None


def plain_value(value: object) -> object:
    """The same inside of tuples; texts and whole numbers as they are."""
    if isinstance(value, tuple):
        return [plain_value(one) for one in value]
    return _json(value) if isinstance(value, float) else value


def _curve_json(curve: Curve | None) -> dict[str, float | None] | None:
    if curve is None:
        return None
    return {name: _json(value) for name, value in vars(curve).items()}
