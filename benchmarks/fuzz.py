"""Configurations, environments and command lines: what is wrong must be refused, in one sentence and at once.

    python benchmarks/fuzz.py              # 20,000 inputs, 1 process
    python benchmarks/fuzz.py --quick

First come all texts of the tables by themselves, and all hostile files. Then come random inputs, made by damaging
bytes and lines of whole files. Seeds make them repeatable.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from common import Report, Trials, parse_for_trials

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.config.fuzzing import each
from tests.config.fuzzing.trial import MAKERS, Outcome, sandbox, trial, warm_up

INPUTS, QUICK_INPUTS = 20_000, 1_000


def main() -> None:
    arguments = parse_for_trials(__doc__ or "", "fuzz", Trials("inputs", "inputs", INPUTS, QUICK_INPUTS))
    report = Report("fuzz", "Random configurations, environments and command lines")
    with tempfile.TemporaryDirectory() as folder, sandbox(Path(folder)):
        warm_up()
        outcomes = [trial(given) for given in each.inputs()]
        outcomes += [outcome_of(seed) for seed in tqdm(range(arguments.inputs), unit="input")]
    kinds = list(dict.fromkeys(outcome.kind for outcome in outcomes))
    rows = [row_of(kind, [outcome for outcome in outcomes if outcome.kind == kind]) for kind in kinds]
    rows.append(row_of("all", outcomes))
    failures = [vars(outcome) for outcome in outcomes if outcome.failure]
    report.finish(
        ["input", "count", "accepted", "refused", "failures", "slowest (ms)"],
        [[str(value) for value in row.values()] for row in rows],
        {"kinds": rows, "failures": failures},
        {"inputs": arguments.inputs, "makers": len(MAKERS)},
        arguments.output.resolve() if arguments.output else None,
        [
            "failure: a traceback, nonsense accepted, a value lost or changed, not exactly one message, or over 1 s.",
            "slowest: milliseconds of processor time, after imports.",
        ],
    )
    sys.exit(bool(failures))


def outcome_of(seed: int) -> Outcome:
    """Of the input of a seed; each way of making one has its turn."""
    return trial(MAKERS[seed % len(MAKERS)](random.Random(seed)))


def row_of(kind: str, outcomes: list[Outcome]) -> dict[str, str | int]:
    return {
        "input": kind,
        "count": len(outcomes),
        "accepted": sum(outcome.accepted for outcome in outcomes),
        "refused": sum(not outcome.accepted for outcome in outcomes),
        "failures": sum(outcome.failure is not None for outcome in outcomes),
        "slowest_ms": round(1e3 * max(outcome.seconds for outcome in outcomes)),
    }


if __name__ == "__main__":
    main()
