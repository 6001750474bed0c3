"""Does a run that is killed while it saves always continue from a whole checkpoint?

    python benchmarks/crash_points.py              # every point
    python benchmarks/crash_points.py --quick      # every 40th

A run saves again and again. It is killed before every operation on files and in the middle of every write, in saves,
publication, removal of older checkpoints and clean-up after an earlier kill. A new process then has to load exactly
what was being saved (N) or what had been saved before (N-1), train on and save. The same is asked after a failure of
the power, for which the operations are replayed and what was not synced is lost, and when operations fail.
torch.distributed.checkpoint, which overwrites in place, is killed in the same way.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from tqdm import tqdm

from common import Report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from checkpoint.crash.crashes import Outcome
from checkpoint.crash.trials import TRIALS, killed, killed_twice, make, pool, really_killed
from torch_checkpoint import IN_PLACE, NEW_DIRECTORIES

SLICES, QUICK_SLICES = 8, 40
RESULTS = ("N", "N-1", "none", "unreadable", "mixed")
PEERS = [IN_PLACE, NEW_DIRECTORIES]
KILLS = (killed, really_killed, killed_twice)


def main() -> None:
    arguments = parse()
    os.environ.update(
        {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RES_OPTIONS": "timeout:1 attempts:1"}
    )
    report = Report("crash_points", "What a new process loads after a run was stopped while it saved")
    slices = QUICK_SLICES if arguments.quick else SLICES
    taken = 1 if arguments.quick else SLICES
    found: dict[str, list[Outcome]] = defaultdict(list)
    started = time.perf_counter()
    table = [*TRIALS, *PEERS]
    with pool(multiprocessing.get_context("spawn"), arguments.workers) as executor:
        with tqdm(total=len(table) * taken, unit="part") as bar:
            for trial, outcomes in make(executor, table, slices, taken):
                found[trial.name] += outcomes
                bar.set_postfix(points=sum(map(len, found.values())))
                bar.update()
    seconds = time.perf_counter() - started
    ms_per_point = 1000 * seconds / sum(map(len, found.values()))
    rows = [row_of(trial.name, found[trial.name]) for trial in table]
    ours = [one for trial in TRIALS for one in found[trial.name]]
    kills = [one for trial in TRIALS if trial.kind in KILLS for one in found[trial.name]]
    rows += [row_of("Lockstep, killed once or twice", kills), row_of("Lockstep, all", ours)]
    wrong = [vars(one) for one in ours if not one.is_right]
    report.finish(
        ["stopped", "points", *RESULTS, "otherwise wrong"],
        [[str(value) for value in row.values()] for row in rows],
        {"trials": rows, "seconds": round(seconds, 1), "wrong": wrong},
        {"slices": slices, "taken": taken, "workers": arguments.workers, "threads": 1},
        arguments.output,
        [
            "N: what was being saved; N-1: what had been saved before; none: nothing had been, and that is said.",
            "otherwise wrong: another step, the next save fails, files are left behind, the error explains nothing.",
            f"{seconds:.0f} s with {arguments.workers} processes, {ms_per_point:.0f} ms a point.",
        ],
    )
    sys.exit(bool(wrong))


def row_of(name: str, outcomes: list[Outcome]) -> dict[str, str | int]:
    counts = Counter(one.result for one in outcomes)
    row: dict[str, str | int] = {"trial": name, "points": len(outcomes)}
    row.update({result: counts[result] for result in RESULTS})
    row["otherwise wrong"] = len(outcomes) - sum(counts[result] for result in RESULTS)
    return row


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"every {QUICK_SLICES}th point")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    parser.add_argument("--output", type=Path, default=None, help="JSON file (results/crash_points.json)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
