"""How long `lockstep report` takes for a run of 100,000 steps, and how large its page is.

    python benchmarks/report.py
    python benchmarks/report.py --quick

The run never was: its files are written beforehand. Timed is the whole command, a process of its own, from its start
to its end; the first one, which writes the byte code, does not count.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import common

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.report.runs import END, LONG, Start, Synthetic, write_run

SIZES = (1_000, 10_000, 100_000)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 11")
    parser.add_argument("--rounds", type=int, help="reports of each run (default 11, quick 3)")
    parser.add_argument("--output", type=Path, help="JSON file (default benchmarks/results/report.json)")
    chosen = parser.parse_args()
    chosen.rounds = chosen.rounds or (3 if chosen.quick else 11)
    return chosen


def seconds(folders: list[Path], page: Path) -> tuple[float, float]:
    """Wall-clock and CPU seconds of one report.

    Raises:
        SystemExit: it failed.
    """
    words = [*common.LOCKSTEP, "report", *map(str, folders), "-o", str(page)]
    known = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    process = subprocess.Popen(words, env=known | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(words)} failed.")
    return wall, used.ru_utime + used.ru_stime


def main() -> None:
    chosen = options()
    report = common.Report("report", "lockstep report")
    rows, figures = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        cases = {f"{size:,} steps": [write_run(folder / f"steps{size}", of_length(size))] for size in SIZES}
        cases["2 runs of 10,000 steps"] = [
            write_run(folder / f"pair{seed}", replace(of_length(10_000), seed=seed)) for seed in (0, 1)
        ]
        for name, folders in cases.items():
            page = folder / "page.html"
            measured = [seconds(folders, page) for _ in range(chosen.rounds + 1)][1:]
            read = sum(path.stat().st_size for one in folders for path in one.glob("*.jsonl"))
            wall, cpu = (common.summary([one[place] for one in measured]) for place in (0, 1))
            rows.append(
                [name, f"{read / 1e6:.1f}", wall.show(2), cpu.show(2), f"{page.stat().st_size / 1e3:.0f}"]
            )
            figures.append(
                {
                    "case": name,
                    "read_bytes": read,
                    "wall_s": wall.to_dict(),
                    "cpu_s": cpu.to_dict(),
                    "page_bytes": page.stat().st_size,
                }
            )
    report.finish(
        ["case", "files, MB", "wall, s", "CPU, s", "page, kB"],
        rows,
        figures,
        {"rounds": chosen.rounds},
        chosen.output,
        [f"Medians (quartiles) of {chosen.rounds} processes each, from their start to their end."],
    )


def of_length(steps: int) -> Synthetic:
    """A run with spikes, checkpoints and events; it makes so many steps."""
    return (
        LONG
        if steps == 100_000
        else replace(LONG, starts=(Start(1, steps, ends=END),), save_every=steps // 50)
    )


if __name__ == "__main__":
    main()
