"""From the launcher's start to the first line of user code: lockstep launch, torchrun, accelerate launch.

    python benchmarks/launch_time.py
    python benchmarks/launch_time.py --quick

The script's first line notes the time; the latest rank counts. The launchers take turns, in an order
that rotates. The total is until the launcher has ended.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

SCRIPT = """\
import time; now = time.time()
import os
with open(os.path.join(os.environ["LAUNCH_TIME_DIR"], os.environ["RANK"]), "w") as file:
    file.write(repr(now))
"""
REFERENCE = "torchrun"
# With --cpu it starts one process whatever --num_processes says; this is its way to several, also on CPUs.
ACCELERATE_SEVERAL = "--multi_gpu"
DIRECTORY_VARIABLE = "LAUNCH_TIME_DIR"


def commands(nproc: int) -> dict[str, list[str]]:
    """Each launcher's command, as its users type it, without the script."""
    folder = Path(sys.executable).parent
    if nproc < 2:
        raise SystemExit(
            f"--nproc is {nproc}, but the launchers are compared on several processes. Use 2 or more."
        )
    return {
        REFERENCE: [str(folder / "torchrun"), "--nproc-per-node", str(nproc)],
        "lockstep launch": [str(folder / "lockstep"), "launch", "--nproc", str(nproc)],
        "accelerate launch": [
            str(folder / "accelerate"),
            *f"launch {ACCELERATE_SEVERAL} --num_processes {nproc} --num_machines 1".split(),
            *["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"],
        ],
    }


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 15")
    parser.add_argument("--rounds", type=int, help="launches a launcher (default 15, quick 3)")
    parser.add_argument("--nproc", type=int, default=2, help="processes (default %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file (default benchmarks/results/launch_time.json)")
    chosen = parser.parse_args()
    chosen.rounds = chosen.rounds or (3 if chosen.quick else 15)
    return chosen


def launch(command: list[str], nproc: int) -> dict[str, float]:
    """Seconds until the last rank's first line, and until the launcher's end.

    Raises:
        SystemExit: the launcher failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        environment = {**os.environ, DIRECTORY_VARIABLE: folder, "OMP_NUM_THREADS": "1"}
        start = time.time()
        done = subprocess.run([*command, str(script)], env=environment, capture_output=True, text=True)
        end = time.time()
        if done.returncode != 0:
            raise SystemExit(f"{Path(command[0]).name} failed:\n{done.stderr[-2000:]}")
        times = [float(Path(folder, str(rank)).read_text()) for rank in range(nproc)]
    return {"first_line_s": max(times) - start, "total_s": end - start}


def main() -> None:
    chosen = options()
    known = commands(chosen.nproc)
    report = common.Report(
        "launch_time", f"From start to the first line of user code, {chosen.nproc} processes"
    )
    names = list(known)
    taken: dict[str, dict[str, list[float]]] = {name: {"first_line_s": [], "total_s": []} for name in names}
    for turn in range(-1, chosen.rounds):  # the first round only fills the file cache
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            seconds = launch(known[name], chosen.nproc)
            if turn >= 0:
                for kind, value in seconds.items():
                    taken[name][kind].append(value)
    rows, figures = [], []
    reference = taken[REFERENCE]
    for name, values in taken.items():
        entry = {kind: common.summary(values[kind]) for kind in values}
        for kind in values:
            entry[kind.replace("_s", "_ratio")] = common.summary(common.ratios(values[kind], reference[kind]))
        rows.append([name, *(entry[kind].show(2) for kind in ("first_line_s", "first_line_ratio"))])
        rows[-1] += [entry[kind].show(2) for kind in ("total_s", "total_ratio")]
        figures.append({"launcher": name, **{kind: one.to_dict() for kind, one in entry.items()}})
    report.finish(
        ["launcher", "first line, s", f"ratio to {REFERENCE}", "end, s", "ratio"],
        rows,
        figures,
        {"rounds": chosen.rounds, "nproc": chosen.nproc},
        chosen.output,
        [
            f"Medians (quartiles) of {chosen.rounds} launches each; ratios compare launches of the same round.",
            "accelerate launch runs with --multi_gpu: with --cpu it would start one process only.",
        ],
    )


if __name__ == "__main__":
    main()
