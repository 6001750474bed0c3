"""One run, or several beside each other: as sentences, as JSON, as a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.history.columns import number
from lockstep.history.read import RunHistory, read_run
from lockstep.report.compare import (
    check_count,
    comparison_sentences,
    numbers_part,
    settings_that_differ,
    told_apart,
)
from lockstep.report.language_model import LanguageModel
from lockstep.report.numbers import Curve, RunNumbers, numbers_of
from lockstep.report.summary import chapters, sentences

FORMAT = "lockstep report 1"
SINGLE, SEVERAL = "report.html", "comparison.html"
"""The file that is written in the folder of the first run if no other is named."""


@dataclass(frozen=True)
class RunReport:
    """What is said of ``runs``, whose ``names`` tell them apart, at ``now`` (seconds since 1970); and of how long
    ``language_model`` would take at their rates."""

    runs: tuple[RunHistory, ...]
    numbers: tuple[RunNumbers, ...]
    names: tuple[str, ...]
    now: float
    language_model: LanguageModel | None = None

    @property
    def default_path(self) -> Path:
        return self.runs[0].path / (SINGLE if len(self.runs) == 1 else SEVERAL)

    def text(self) -> list[tuple[str, list[str]]]:
        """(title, sentences): of one run what it did, of several what differs and each run's own."""
        if len(self.runs) == 1:
            comparisons = [
                ("At this rate", self._rate(one)) for one in self.numbers if self.language_model is not None
            ]
            return [*chapters(self.numbers[0]), *comparisons]
        own = [
            (name, [*sentences(one), *self._rate(one)])
            for name, one in zip(self.names, self.numbers, strict=True)
        ]
        return [("What differs", comparison_sentences(self.runs, self.names)), *own]

    def _rate(self, numbers: RunNumbers) -> list[str]:
        return [] if self.language_model is None else [self.language_model.sentence(numbers)]

    def page(self) -> str:
        """A complete HTML document that loads nothing."""
        from lockstep.report.page import comparison_page, run_page

        if len(self.runs) == 1:
            return run_page(self.runs[0], self.numbers[0], self.now)
        return comparison_page(self.runs, self.numbers, self.names, self.now)

    def to_json(self) -> dict[str, object]:
        """``format``; ``runs``: of each its ``name``, ``path``, ``sentences`` and all that ``plain.to_json`` has;
        ``language_model_seconds``, if one was asked for; ``comparison``, null for one run: its ``sentences``,
        ``settings`` that differ (``name``, ``values``, ``sources``), and for each run after the first where its
        ``numbers`` part from those of the first (``compare.NumbersPart``)."""
        runs = [
            {
                "name": name,
                "path": str(run.path),
                "sentences": [*sentences(one), *self._rate(one)],
                **to_json(one),
                **self._seconds(one),
            }
            for name, run, one in zip(self.names, self.runs, self.numbers, strict=True)
        ]
        return {"format": FORMAT, "runs": runs, "comparison": self._comparison()}

    def _seconds(self, numbers: RunNumbers) -> dict[str, object]:
        model = self.language_model
        return {} if model is None else {"language_model_seconds": plain_value(model.seconds(numbers))}

    def _comparison(self) -> dict[str, object] | None:
        if len(self.runs) == 1:
            return None
        settings = [
            {
                "name": one.name,
                "values": [value for value, _ in one.values],
                "sources": [source for _, source in one.values],
            }
            for one in settings_that_differ(self.runs)
        ]
        parts = [
            {"name": name, **{key: plain_value(value) for key, value in vars(part).items()}}
            for name, part in zip(
                self.names[1:], (numbers_part(self.runs[0], run) for run in self.runs[1:]), strict=True
            )
        ]
        sentences = comparison_sentences(self.runs, self.names)
        return {"sentences": sentences, "settings": settings, "numbers": parts}


def report_of(
    paths: Sequence[str | Path], now: float, language_model: LanguageModel | None = None
) -> RunReport:
    """Read the folders of these runs; ``language_model``: say how long its training would take.

    Raises:
        ConfigError: one of them is no run's folder, or there are too many.
    """
    check_count(paths)
    runs = tuple(read_run(path) for path in paths)
    numbers = tuple(numbers_of(run, now) for run in runs)
    return RunReport(runs, numbers, tuple(told_apart(runs)), now, language_model)


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
