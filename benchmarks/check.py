"""``lockstep check`` on runs that are right: how many does it call wrong?

    python benchmarks/check.py                  # all pairs; 2 cores, about 20 minutes
    python benchmarks/check.py --quick

A pair is a model, a way to train it and a strategy, on 2 or 4 processes, whose every tensor of 3 steps is compared with
one process's. Each reference is made once for all strategies with as many batches. What Lockstep refuses to train so is
listed and not counted. An alarm is a pair that is said to differ. Then: what a step costs while it is looked at.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
from check_cost import StepCost, cost
from check_training import OWN, TRANSFORMERS

sys.path.insert(0, str(common.BENCHMARKS.parent))  # the runs without a start of their own are the tests'

from tests.verify.forks import ForkedCheck, ForkServer

from lockstep.errors import LockstepError
from lockstep.verify import CheckedProgram, CouldNotRun, Request, sentence

SCRIPT = common.BENCHMARKS / "check_training.py"
MODELS = (*OWN, *TRANSFORMERS)
OF_TWO = (
    "ddp",
    "zero=1",
    "zero=2",
    "zero=3",
    "zero=3 activation=full",
    "ddp activation=full",
    "zero=2 offload=optimizer",
)
SPLIT = ("tp=2", "tp=2 sequence_parallel", "pp=2", "cp=2")
COSTS = ("ddp", "zero=2", "zero=3", "tp=2")
OF_FOUR = (("zero=3 tp=2",), ("zero=3 replicate=2", "zero=1"))
REFUSED = re.compile(r"(UsageError|ConfigError|StructureError|\w+Error): ")


class Setting(NamedTuple):
    """How a model is trained."""

    optimizer: str
    accumulation: int
    clip: float
    precision: str

    @property
    def words(self) -> tuple[str, ...]:
        return (
            f"--optimizer={self.optimizer}",
            f"--accumulation={self.accumulation}",
            f"--clip={self.clip}",
        )


SETTINGS = (
    Setting("adamw", 2, 0.5, "no"),
    Setting("sgd", 1, 0.0, "bf16"),
    Setting("adafactor", 1, 0.5, "no"),
    Setting("adamw", 1, 0.0, "bf16"),
)


class Group(NamedTuple):
    """Pairs of one reference."""

    model: str
    setting: Setting
    nproc: int
    strategies: Sequence[str]


def groups(quick: bool) -> Iterator[Group]:
    models = MODELS[:4] if quick else MODELS
    for number, setting in enumerate(SETTINGS[:1] if quick else SETTINGS):
        for model in models:
            yield Group(model, setting, 2, OF_TWO)
            yield Group(model, setting, 2, SPLIT)
            if number < 2:
                for strategies in OF_FOUR:
                    yield Group(model, setting, 4, strategies)


class Pairs:
    """Checks pairs, one after another."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._seed = f"--seed={seed}"
        models = [f"transformers.models.{name}.modeling_{name}" for name in TRANSFORMERS]
        self._server = ForkServer(models)
        self._number = 0

    def check(self, group: Group) -> Iterator[dict[str, str]]:
        """One row for each strategy."""
        trace = self._folder / f"{self._number}.trace"
        for strategy in group.strategies:
            yield {
                "model": group.model,
                **{name: str(value) for name, value in group.setting._asdict().items()},
                "nproc": str(group.nproc),
                "strategy": strategy,
                **self._outcome(group, strategy, trace),
            }
        trace.unlink(missing_ok=True)

    def _outcome(self, group: Group, strategy: str, trace: Path) -> dict[str, str]:
        self._number += 1
        is_first = not trace.exists()
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            request = Request(
                CheckedProgram((str(SCRIPT), group.model, self._seed, *group.setting.words)),
                Path(folder),
                nproc=group.nproc,
                parallel=strategy,
                mixed_precision=group.setting.precision,
                record=trace if is_first else None,
                against=None if is_first else trace,
                timeout_s=120,
            )
            start = time.monotonic()
            try:
                verdict = ForkedCheck(request, self._server).verdict()
            except LockstepError as error:
                return _failure(error)
            ratio = verdict.largest.ratio if verdict.largest is not None else 0.0
            return {
                "outcome": "agrees" if verdict.agrees else "ALARM",
                "said": sentence(verdict),
                "largest": f"{ratio:.3g}",
                "seconds": f"{time.monotonic() - start:.1f}",
            }

    def close(self) -> None:
        self._server.close()


def _failure(error: LockstepError) -> dict[str, str]:
    lines = [line for line in str(error).splitlines() if REFUSED.search(line)]
    line = lines[-1] if lines else str(error).strip().splitlines()[-1]
    is_refusal = not isinstance(error, CouldNotRun) or "lockstep.errors." in line
    return {"outcome": "refused" if is_refusal else "FAILED", "said": line[-300:]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="four models, one setting")
    parser.add_argument("--only", nargs="+", default=[], help="models")
    parser.add_argument("--seed", type=int, default=5, help="of weights and data (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of the cost of a step (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no further pair begins")
    parser.add_argument("--output", type=Path, help="JSON file (results/check.json)")
    chosen = parser.parse_args()
    report = common.Report("check", "lockstep check on runs that are right")
    end_at = time.monotonic() + 60 * chosen.minutes
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        pairs = Pairs(Path(folder), chosen.seed)
        for group in groups(chosen.quick):
            if (chosen.only and group.model not in chosen.only) or time.monotonic() > end_at:
                continue
            for row in pairs.check(group):
                found.append(row)
                print(" ".join(f"{row.get(key, '')}" for key in ROW), flush=True)
        pairs.close()
        costs = [cost(words, chosen.rounds, Path(folder)) for words in COSTS] if chosen.rounds else []
    _report(report, found, costs, chosen)


def _report(
    report: common.Report, found: list[dict[str, Any]], costs: list[StepCost], chosen: argparse.Namespace
) -> None:
    by_model = {model: Counter(row["outcome"] for row in found if row["model"] == model) for model in MODELS}
    outcomes = ("agrees", "ALARM", "refused", "FAILED")
    table = [
        [model, *(str(counts[name]) for name in outcomes)] for model, counts in by_model.items() if counts
    ]
    total = Counter(row["outcome"] for row in found)
    report.finish(
        ["model", *outcomes],
        [*table, ["all", *(str(total[name]) for name in outcomes)]],
        {"outcomes": dict(total), "costs": [one._asdict() for one in costs], "pairs": found},
        {"seed": chosen.seed, "rounds": chosen.rounds, "only": chosen.only, "quick": chosen.quick},
        chosen.output,
        [
            "FAILED: the run itself raised an error, of torch or of Lockstep, that is no refusal.",
            *(
                f"{one.strategy}: a step that is looked at takes {one.step_ratio:.2f} times the step alone "
                f"({one.plain_s:.2f} s), and a rank's peak of memory is {one.memory_ratio:.2f} times as large."
                for one in costs
            ),
        ],
    )


ROW = (
    "outcome",
    "model",
    "optimizer",
    "accumulation",
    "precision",
    "nproc",
    "strategy",
    "seconds",
    "largest",
    "said",
)

if __name__ == "__main__":
    main()
