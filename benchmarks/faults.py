"""Does a run that is disturbed all the time end as one that is not: same samples, same bits, every fault named?

    python benchmarks/faults.py                  # 50 faults in 2,000 steps with 2 ranks
    python benchmarks/faults.py --quick          # 9 faults in 360 steps

Faults strike at random moments of random steps: workers and launchers are killed, stopped, told to end, fail, and find
the disk full. Whatever ends the command, the same command is started again, as a supervisor would. Seeds make the
plan repeatable, the moments within a step are not.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from common import Report, Trials, parse_for_trials, summary

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from tests.faults.kinds import KINDS, draw  # noqa: E402
from tests.faults.soak import RANKS, can_fill_a_disk, compare, soak  # noqa: E402

FAULTS, QUICK_FAULTS, STEPS_PER_FAULT, SEED = 50, 9, 40, 6


def main() -> None:
    trials = Trials("faults", "faults", FAULTS, QUICK_FAULTS)
    arguments = parse_for_trials(__doc__ or "", "faults", trials)
    count, steps = arguments.faults, arguments.faults * STEPS_PER_FAULT
    report = Report("faults", f"{count} faults in {steps} steps with {RANKS} ranks")
    with tempfile.TemporaryDirectory(prefix="lockstep-faults-") as folder:
        place = Path(folder)
        kinds = (
            KINDS
            if can_fill_a_disk(place / "probe")
            else tuple(kind for kind in KINDS if kind != "full disk")
        )
        faults = draw(count, steps, RANKS, SEED, kinds)
        soak(place / "undisturbed", steps, [])
        with tqdm(total=count, unit="fault") as bar:
            outcome = soak(place / "disturbed", steps, faults, progress=lambda done: bar.update(done - bar.n))
        compare(place / "disturbed", place / "undisturbed", outcome)
    killed = summary(outcome.recovery_s["kill worker"])
    all_kinds = [seconds for kind in outcome.recovery_s.values() for seconds in kind]
    rows = [
        ("faults that struck", f"{outcome.struck} of {count}"),
        ("samples lost", str(outcome.lost)),
        ("samples repeated", str(outcome.repeated)),
        ("parameters equal to the undisturbed run's", "bit for bit" if outcome.equal_parameters else "NO"),
        ("processes left 2 s after a launcher's end", str(outcome.orphans)),
        ("starts of the command", str(outcome.starts)),
        ("rank and cause named", f"{count - len(outcome.unnamed)} of {count}"),
        ("kill of a worker to next commit, s", killed.show(1)),
        ("any fault to next commit, s", f"{summary(all_kinds).show(1)}, at most {max(all_kinds):.1f}"),
        ("whole run, s", f"{outcome.seconds:.0f}"),
    ]
    report.finish(
        ["", "found"],
        rows,
        asdict(outcome),
        {
            "faults": count,
            "steps": steps,
            "seed": SEED,
            "kinds": dict(Counter(fault.kind for fault in faults)),
        },
        arguments.output,
        notes=[f"not named: {text}" for text in outcome.unnamed],
    )
    if outcome.lost or outcome.repeated or not outcome.equal_parameters or outcome.orphans:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
