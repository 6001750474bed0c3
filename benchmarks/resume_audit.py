"""Is a run that was stopped and goes on the run that was not: the same samples, the same bits, the same losses?

    python benchmarks/resume_audit.py            # 50 stop points for each pair of worlds, up to 4 processes
    python benchmarks/resume_audit.py --quick

Each trial draws a kind of loader, how the model is spread before and after, a precision, a window of accumulation, an
optimizer and a micro-batch to stop behind. In every fifth, all processes get SIGKILL at a random moment after a
checkpoint was published, and the run goes on from the newest. Seeds make the trials repeatable, except those moments.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from common import Report, Trials, parse_for_trials

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from checkpoint.audit.harness import examine, examine_killed, replace_workers  # noqa: E402
from checkpoint.audit.judge import LOSS_TOLERANCE, PARAMETER_TOLERANCE, Verdict  # noqa: E402
from checkpoint.audit.loaders import EPOCHS, KINDS  # noqa: E402
from checkpoint.audit.trials import WORLDS, Trial, draw_trial  # noqa: E402
from lockstep.testing import DistributedTestError, WorkerPool  # noqa: E402

STOPS, QUICK_STOPS, KILL_EVERY = 50, 5, 5


def main() -> None:
    stops = Trials("stops", "stop points for each pair of worlds", STOPS, QUICK_STOPS)
    arguments = parse_for_trials(__doc__ or "", "resume_audit", stops)
    report = Report(
        "resume_audit", "Runs that stop anywhere and go on: what differs from the run that did not stop"
    )
    started = time.perf_counter()
    plan = [(pair, number) for number in range(arguments.stops) for pair in WORLDS]
    trials: list[Trial] = []
    verdicts: list[Verdict] = []
    pool = WorkerPool()
    try:
        for pair, number in tqdm(plan, unit="stop"):
            trial = draw_trial(*pair, number, kills=number % KILL_EVERY == KILL_EVERY - 1)
            trials.append(trial)
            verdicts.append(verdict_on(pool, trial))
    finally:
        pool.close()
    rows = [
        row_of(pair, [(t, v) for t, v in zip(trials, verdicts, strict=True) if (t.before, t.after) == pair])
        for pair in WORLDS
    ]
    wrong = [verdict for verdict in verdicts if not verdict.is_right]
    report.finish(
        [
            "ranks",
            "stops",
            "in a window",
            "killed",
            "wrong samples",
            "bit-identical",
            "loss difference",
            "parameter difference",
        ],
        [shown(row) for row in rows],
        {
            "pairs": rows,
            "loaders": Counter(trial.kind_name for trial in trials),
            "optimizers": Counter(trial.optimizer for trial in trials),
            "strategies": Counter(strategy for trial in trials for strategy in trial.parallel),
            "precisions": Counter(trial.precision for trial in trials),
            "windows": Counter(str(trial.accumulation) for trial in trials),
            "seconds": round(time.perf_counter() - started, 1),
            "wrong": [vars(verdict) for verdict in wrong],
        },
        {"stops": arguments.stops, "kinds of loaders": len(KINDS), "epochs": EPOCHS, "threads": 1},
        arguments.output,
        [
            "wrong samples: of both runs together, missing, twice, or in another place than plain torch puts them.",
            "bit-identical: samples and losses of each rank, parameters, optimizer, schedule, loss scale, generators.",
            f"differences: the largest, relative, from plain torch on one process; losses at most {LOSS_TOLERANCE:g}, "
            f"parameters (of SGD, norm-wise for each tensor) at most {PARAMETER_TOLERANCE:g}.",
            f"trials with anything wrong: {len(wrong)} of {len(trials)}",
            *(f"  {verdict}" for verdict in wrong),
        ],
    )
    sys.exit(bool(wrong))


def verdict_on(pool: WorkerPool, trial: Trial) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        try:
            if trial.kill_after is not None:
                return examine_killed(pool, trial, Path(folder))
            return examine(pool.run, [trial], Path(folder))[0]
        except DistributedTestError as error:
            replace_workers(pool)
            return Verdict(str(trial), trial.stop, 0, problems=[str(error)])


def row_of(
    pair: tuple[int, int], outcomes: list[tuple[Trial, Verdict]]
) -> dict[str, str | int | float | None]:
    verdicts = [verdict for _, verdict in outcomes]
    compared = [verdict for verdict in verdicts if verdict.different is not None]
    return {
        "ranks": "{} -> {}".format(*pair),
        "stops": len(outcomes),
        "killed": sum(trial.kill_after is not None for trial, _ in outcomes),
        "micro_batches_lost_to_kills": sum(verdict.replayed for verdict in verdicts),
        "inside_epochs": sum(place_of(*outcome) > 0 for outcome in outcomes),
        "inside_windows": sum(place_of(*outcome) % outcome[0].accumulation > 0 for outcome in outcomes),
        "wrong_samples": sum(verdict.wrong_samples for verdict in verdicts),
        "bit_identical": sum(not verdict.different for verdict in compared) if pair[0] == pair[1] else None,
        "loss_difference": largest([verdict.loss_difference for verdict in verdicts]),
        "parameter_difference": largest([verdict.parameter_difference for verdict in verdicts]),
        "failed": sum(bool(verdict.problems) for verdict in verdicts),
    }


def place_of(trial: Trial, verdict: Verdict) -> int:
    """Micro-batches of the epoch that were behind the run where it went on."""
    return verdict.start % trial.kind.steps(trial.before)


def largest(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def shown(row: dict[str, str | int | float | None]) -> list[str]:
    identical, losses, parameters = (
        row[key] for key in ("bit_identical", "loss_difference", "parameter_difference")
    )
    return [
        *(str(row[key]) for key in ("ranks", "stops", "inside_windows", "killed", "wrong_samples")),
        "" if identical is None else f"{identical} of {row['stops']}",
        *("" if value is None else f"{value:.1e}" for value in (losses, parameters)),
    ]


if __name__ == "__main__":
    main()
