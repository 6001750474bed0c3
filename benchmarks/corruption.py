"""How much damage to a checkpoint goes unnoticed, and does a run continue from the older one?

    python benchmarks/corruption.py              # 2,250 damaged checkpoints, 1 process
    python benchmarks/corruption.py --quick

A run saves two checkpoints. The newer one is damaged at random, in each way equally often, and loaded: by its name,
then as what is newest and whole. Seeds make the damage repeatable.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

from common import Report, Trials, parse_for_trials

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from checkpoint.damage import KINDS
from checkpoint.damage_trial import Bench, Outcome

EACH, QUICK_EACH = 125, 5


def main() -> None:
    each = Trials("each", "damaged checkpoints of each kind", EACH, QUICK_EACH)
    arguments = parse_for_trials(__doc__ or "", "corruption", each)
    torch.set_num_threads(1)
    report = Report("corruption", "Damaged checkpoints: found out before a tensor is loaded, and passed over")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        bench.check_the_newest_loads()
        trials = [(kind, seed) for seed in range(arguments.each) for kind in KINDS]
        outcomes = [bench.trial(*trial) for trial in tqdm(trials, unit="checkpoint")]
    seconds = time.perf_counter() - started
    rows = [row_of(kind, [outcome for outcome in outcomes if outcome.kind == kind]) for kind in KINDS]
    rows.append(row_of("all", outcomes))
    wrong = [outcome for outcome in outcomes if not outcome.is_right]
    report.finish(
        ["damage", "count", "detected", "named", "fell back"],
        [[str(value) for value in row.values()] for row in rows],
        {"kinds": rows, "seconds": round(seconds, 1), "wrong": [vars(outcome) for outcome in wrong]},
        {"each": arguments.each, "kinds": len(KINDS), "threads": 1},
        arguments.output,
        [
            "detected: load_state(directory) raised CheckpointError and had changed nothing.",
            "named: the error named a damaged file.",
            "fell back: load_state() had changed nothing when it warned, and restored the older checkpoint exactly.",
        ],
    )
    sys.exit(bool(wrong))


def row_of(name: str, outcomes: list[Outcome]) -> dict[str, str | int]:
    return {
        "damage": name,
        "count": len(outcomes),
        "detected": sum(outcome.detected for outcome in outcomes),
        "named": sum(outcome.named for outcome in outcomes),
        "fell_back": sum(outcome.fell_back for outcome in outcomes),
    }


if __name__ == "__main__":
    main()
