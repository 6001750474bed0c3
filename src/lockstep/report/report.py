"""One run: as sentences, as JSON, as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.history.read import RunHistory, read_run
from lockstep.report.numbers import Curve, RunNumbers, numbers_of
from lockstep.report.summary import chapters, sentences

FORMAT = "lockstep report 1"


@dataclass(frozen=True)
class RunReport:
    """What is said of a run at ``now`` (seconds since 1970)."""

    run: RunHistory
    numbers: RunNumbers
    now: float

    @property
    def default_path(self) -> Path:
        """The file that is written if no other is named."""
        return self.run.path / "report.html"

    def text(self) -> list[tuple[str, list[str]]]:
        """Return (title, sentences) of what it did."""
        return chapters(self.numbers)

    def page(self) -> str:
        """Return a complete HTML document that loads nothing."""
        from lockstep.report.page import run_page

        return run_page(self.run, self.numbers, self.now)

    def to_json(self) -> dict[str, object]:
        """Return ``format`` and ``runs``: of the one ``name``, ``path``, ``sentences`` and what ``to_json`` has."""
        own = {"name": self.run.name, "path": str(self.run.path), "sentences": sentences(self.numbers)}
        return {"format": FORMAT, "runs": [{**own, **to_json(self.numbers)}]}


def report_of(path: str | Path, now: float) -> RunReport:
    """Read the folder of a run.

    Raises:
        ConfigError: it is no run's folder.
    """
    run = read_run(path)
    return RunReport(run, numbers_of(run, now), now)


def to_json(numbers: RunNumbers) -> dict[str, object]:
    """Return plain values only; what is not known is null.

    ``status``, ``started``, ``last_sign`` (seconds since 1970), ``starts``, ``world_sizes``, ``steps``,
    ``steps_again``, ``first_step``, ``last_step``, ``total_steps``, ``seconds_left``, ``samples``, ``tokens``,
    ``epoch``, ``loss``, ``gradient_norm``, ``step_seconds``, ``shares`` (of a step's time),
    ``samples_per_second``, ``tokens_per_second``, ``model_flops_per_second``,
    ``mfu``, ``hfu``, ``recomputation``, ``wall_seconds``, ``goodput``, ``lost_seconds``, ``peak_memory_bytes``,
    ``rank_seconds``, ``slow_ranks``,
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
        "peak_memory_bytes": numbers.peak_memory,
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
