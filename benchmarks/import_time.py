"""CPU time of imports: transformers' Trainer on Lockstep by alias and on Accelerate, and the class Accelerator itself.

    python benchmarks/import_time.py
    python benchmarks/import_time.py --quick

Each import is a process of its own, and the two of a pair take turns, in an order that changes. Byte code is there
for all of them: the first round, which does not count, writes it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import common

ALIAS = "from lockstep.compat.accelerate import install; install(); "
CLAIMS = {
    "transformers.Trainer": {
        "lockstep": f"{ALIAS}from transformers import Trainer",
        "accelerate": "from transformers import Trainer",
    },
    "Accelerator": {
        "lockstep": "from lockstep import Accelerator",
        "accelerate": "from accelerate import Accelerator",
    },
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 15")
    parser.add_argument("--rounds", type=int, help="imports of each kind (default 15, quick 3)")
    parser.add_argument("--output", type=Path, help="JSON file (default benchmarks/results/import_time.json)")
    chosen = parser.parse_args()
    chosen.rounds = chosen.rounds or (3 if chosen.quick else 15)
    return chosen


def import_s(code: str) -> float:
    """User and system seconds of a process that only runs ``code``.

    Raises:
        SystemExit: it failed.
    """
    known = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=known | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"python -c {code!r} failed.")
    return used.ru_utime + used.ru_stime


def main() -> None:
    chosen = options()
    report = common.Report("import_time", "CPU time of imports")
    rows, figures = [], []
    for claim, codes in CLAIMS.items():
        taken: dict[str, list[float]] = {name: [] for name in codes}
        for turn in range(-1, chosen.rounds):
            for name in list(codes)[:: 1 if turn % 2 else -1]:
                seconds = import_s(codes[name])
                if turn >= 0:
                    taken[name].append(seconds)
        for name, values in taken.items():
            entry = {
                "cpu_s": common.summary(values),
                "ratio": common.summary(common.ratios(values, taken["accelerate"])),
            }
            rows.append([claim, name, entry["cpu_s"].show(2), entry["ratio"].show(3)])
            figures.append(
                {"import": claim, "library": name, **{kind: one.to_dict() for kind, one in entry.items()}}
            )
    report.finish(
        ["import", "library", "CPU, s", "ratio to accelerate"],
        rows,
        figures,
        {"rounds": chosen.rounds},
        chosen.output,
        [
            f"Medians (quartiles) of {chosen.rounds} processes each; ratios compare processes of the same round."
        ],
    )


if __name__ == "__main__":
    main()
