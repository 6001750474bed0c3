"""One run, or several beside each other: as sentences, as JSON, as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.history.read import RunHistory, read_run
from lockstep.report.compare import (
    check_count,
    comparison_sentences,
    numbers_part,
    settings_that_differ,
    told_apart,
)
from lockstep.report.numbers import Curve, RunNumbers, numbers_of
from lockstep.report.summary import chapters, sentences

FORMAT = "lockstep report 1"
SINGLE, SEVERAL = "report.html", "comparison.html"
"""The file that is written in the folder of the first run if no other is named."""


@dataclass(frozen=True)
class RunReport:
    """What is said of ``runs``, whose ``names`` tell them apart, at ``now`` (seconds since 1970)."""

    runs: tuple[RunHistory, ...]
    numbers: tuple[RunNumbers, ...]
    names: tuple[str, ...]
    now: float

    @property
    def default_path(self) -> Path:
        return self.runs[0].path / (SINGLE if len(self.runs) == 1 else SEVERAL)

    def text(self) -> list[tuple[str, list[str]]]:
        """(title, sentences): of one run what it did, of several what differs and each run's own."""
        if len(self.runs) == 1:
            return chapters(self.numbers[0])
        own = [(name, sentences(one)) for name, one in zip(self.names, self.numbers, strict=True)]
        return [("What differs", comparison_sentences(self.runs, self.names)), *own]

    def page(self) -> str:
        """A complete HTML document that loads nothing."""
        from lockstep.report.page import comparison_page, run_page

        if len(self.runs) == 1:
            return run_page(self.runs[0], self.numbers[0], self.now)
        return comparison_page(self.runs, self.numbers, self.names, self.now)

    def to_json(self) -> dict[str, object]:
        """``format``; ``runs``: of each its ``name``, ``path``, ``sentences`` and all that ``plain.to_json`` has;
        ``comparison``, null for one run: its ``sentences``,
        ``settings`` that differ (``name``, ``values``, ``sources``), and for each run after the first where its
        ``numbers`` part from those of the first (``compare.NumbersPart``)."""
        runs = [
            {
                "name": name,
                "path": str(run.path),
                "sentences": sentences(one),
                **to_json(one),
            }
            for name, run, one in zip(self.names, self.runs, self.numbers, strict=True)
        ]
        return {"format": FORMAT, "runs": runs, "comparison": self._comparison()}

    def _comparison(self) -> object:
        if len(self.runs) == 1:
            return None
        first, *others = self.runs
        settings = [
            {
                "name": one.name,
                "values": [value for value, _ in one.values],
                "sources": [source for _, source in one.values],
            }
            for one in settings_that_differ(self.runs)
        ]
        parts = [
            {"name": name, **vars(numbers_part(first, run))}
            for name, run in zip(self.names[1:], others, strict=True)
        ]
        sentences = comparison_sentences(self.runs, self.names)
        return plain_value({"sentences": sentences, "settings": settings, "numbers": parts})


def report_of(paths: Sequence[str | Path], now: float) -> RunReport:
    """Read the folders of these runs.

    Raises:
        ConfigError: one of them is no run's folder, or there are too many.
    """
    check_count(paths)
    runs = tuple(read_run(path) for path in paths)
    numbers = tuple(numbers_of(run, now) for run in runs)
    return RunReport(runs, numbers, tuple(told_apart(runs)), now)


def to_json(numbers: RunNumbers) -> dict[str, object]:
    """With plain values only; what is not known is null.

    ``status``, ``started``, ``last_sign`` (seconds since 1970), ``starts``, ``world_sizes``, ``steps``,
    ``steps_again``, ``first_step``, ``last_step``, ``total_steps``, ``seconds_left``, ``samples``, ``tokens``,
    ``epoch``, ``loss``, ``gradient_norm``, ``step_seconds``, ``shares`` (of a step's time),
    ``samples_per_second``, ``tokens_per_second``, ``model_flops_per_second``,
    ``mfu``, ``hfu``, ``recomputation``, ``wall_seconds``, ``goodput``, ``lost_seconds``, ``memory_bytes``,
    ``bytes_per_step``, ``rank_seconds``, ``slow_ranks``,
    ``checkpoints``, ``hangs``, ``damage``, ``spikes``, ``batches_skipped``.
    """
    times, wall = numbers.step_times, numbers.goodput
    found = {
        "status": numbers.status.value,
        "started": numbers.first_time,
        "last_sign": numbers.last_time,
        "starts": len(numbers.attempts),
        "world_sizes": numbers.world_sizes,
        "steps": numbers.steps,
        "steps_again": numbers.again,
        "first_step": numbers.first_step,
        "last_step": numbers.last_step,
        "total_steps": numbers.total_steps,
        "seconds_left": numbers.seconds_left,
        "samples": numbers.samples,
        "tokens": numbers.tokens,
        "epoch": numbers.epoch,
        "loss": numbers.loss,
        "gradient_norm": numbers.gradient_norm,
        "step_seconds": None if times is None else {
            name: getattr(times, name) for name in ("mean", "median", "low", "high", "worst", "early", "late")
        },
        "shares": {} if times is None else times.shares,
        "samples_per_second": numbers.samples_per_second,
        "tokens_per_second": numbers.tokens_per_second,
        "model_flops_per_second": numbers.model_flops_per_second,
        "mfu": numbers.peak_share,
        "hfu": numbers.hardware_share,
        "recomputation": numbers.recomputation,
        "wall_seconds": None if wall is None else wall.total,
        "goodput": None if wall is None else wall.share,
        "lost_seconds": {} if wall is None else wall.lost,
        "memory_bytes": numbers.memory,
        "bytes_per_step": numbers.bytes_per_step,
        "rank_seconds": numbers.rank_seconds,
        "slow_ranks": numbers.slow_ranks,
        "checkpoints": len(numbers.checkpoints),
        "hangs": [event.sentence for event in numbers.hangs],
        "damage": [event.sentence for event in numbers.damage],
        "spikes": len(numbers.spikes),
        "batches_skipped": numbers.skipped,
    }  # fmt: skip
    return {name: plain_value(value) for name, value in found.items()}


def plain_value(value: object) -> object:
    """Return a value with curves as objects, and None for what JSON has no number for."""
    if isinstance(value, Curve):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(name): plain_value(one) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain_value(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
