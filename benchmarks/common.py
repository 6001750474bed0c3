"""What the benchmarks share: workers, medians, one table and one JSON file each."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import lockstep
from lockstep.distribution import DISTRIBUTION

BENCHMARKS = Path(__file__).resolve().parent
RESULTS = BENCHMARKS / "results"
PACKAGES = ("torch", "accelerate", "lightning", "deepspeed")
TIMEOUT_S = 1800.0
LOCKSTEP = (sys.executable, "-m", "lockstep.cli.main")
"""The command, from the source that is measured."""


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of some measurements, in their unit."""

    median: float
    q1: float
    q3: float
    count: int

    @property
    def iqr(self) -> float:
        return self.q3 - self.q1

    def to_dict(self) -> dict[str, float]:
        rounded = {name: float(f"{getattr(self, name):.5g}") for name in ("median", "q1", "q3")}
        return {**rounded, "count": self.count}

    def show(self, digits: int = 3) -> str:
        return f"{self.median:.{digits}f}  ({self.q1:.{digits}f} to {self.q3:.{digits}f})"


def summary(values: Sequence[float]) -> Summary:
    """Median and quartiles; of a single value three times that value."""
    if len(values) == 1:
        return Summary(values[0], values[0], values[0], 1)
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(median, q1, q3, len(values))


def ratios(values: Sequence[float], references: Sequence[float]) -> list[float]:
    """Each value over the reference of the same round: what drifts between rounds cancels."""
    return [value / reference for value, reference in zip(values, references, strict=True)]


@dataclass(frozen=True)
class Trials:
    """How many trials a benchmark makes: the option, what it counts, and the numbers by default and with --quick."""

    option: str
    what: str
    count: int
    quick: int


def parse_for_trials(description: str, name: str, trials: Trials) -> argparse.Namespace:
    """The options of a benchmark that counts outcomes of trials."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        f"--{trials.option}", type=int, default=trials.count, help=f"{trials.what} ({trials.count})"
    )
    parser.add_argument("--quick", action="store_true", help=f"{trials.quick} {trials.what}")
    parser.add_argument("--output", type=Path, default=None, help=f"JSON file (results/{name}.json)")
    arguments = parser.parse_args()
    if arguments.quick:
        setattr(arguments, trials.option, trials.quick)
    return arguments


def parse_for_blocks(
    parser: argparse.ArgumentParser, name: str, rounds: int, quick_rounds: int
) -> argparse.Namespace:
    """The parser's options, and those of every benchmark whose contenders take turns in blocks of steps."""
    parser.add_argument(
        "--quick", action="store_true", help="a few rounds: shows that it runs, proves little"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"rounds of one block a contender (default {rounds}, quick {quick_rounds})",
    )
    parser.add_argument("--steps", type=int, default=20, help="timed steps a block (default %(default)s)")
    parser.add_argument("--only", nargs="+", help="contenders besides the hand-written loop")
    parser.add_argument("--output", type=Path, help=f"JSON file (default benchmarks/results/{name}.json)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    chosen.rounds = chosen.rounds or (quick_rounds if chosen.quick else rounds)
    return chosen


def parse_for_models(
    description: str | None, name: str, *, width: int, layers: int, rounds: int
) -> argparse.Namespace:
    """Those of ``parse_for_blocks``, and the size of the models that are compared."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=width, help="features of a token (default %(default)s)")
    parser.add_argument("--layers", type=int, default=layers, help="blocks (default %(default)s)")
    return parse_for_blocks(parser, name, rounds=rounds, quick_rounds=1)


def time_steps(
    loop: Iterator[Any], steps: int, read: Callable[[Any], Any] = lambda given: None
) -> tuple[dict[str, float], list[Any]]:
    """Medians over so many steps of wall-clock ("wall_ms") and of this process's CPU time ("cpu_ms"), in ms; and
    what was read, untimed, from what each step gave."""
    wall, cpu, found = [], [], []
    for _ in range(steps):
        cpu_start = time.process_time()
        start = time.perf_counter()
        given = next(loop)
        wall.append((time.perf_counter() - start) * 1e3)
        cpu.append((time.process_time() - cpu_start) * 1e3)
        found.append(read(given))
    return {"wall_ms": summary(wall).median, "cpu_ms": summary(cpu).median}, found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_workers(script: str, arguments: Sequence[str], world_size: int) -> None:
    """Run a script on ``world_size`` processes of one thread each, told their ranks as ``torchrun`` tells them.

    With one process no rank is told: it is what ``python script`` is.

    Raises:
        SystemExit: a process failed or took too long; the others are ended first.
    """
    base = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    group = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "benchmark",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    workers = []
    for rank in range(world_size):
        identity = {} if world_size == 1 else {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        workers.append(subprocess.Popen([sys.executable, script, *arguments], env={**base, **identity}))
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while any(worker.poll() is None for worker in workers):
            failed = [rank for rank, worker in enumerate(workers) if worker.returncode]
            if failed or time.monotonic() > deadline:
                raise SystemExit(
                    f"rank {failed[0]} failed." if failed else f"no end after {TIMEOUT_S:.0f} s."
                )
            time.sleep(0.2)
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    if any(worker.returncode for worker in workers):
        raise SystemExit("a worker failed.")


def found_by_workers(script: str, arguments: list[str], ranks: int) -> Any:
    """Like ``run_workers``; returns what rank 0 wrote as JSON to the path that ``--worker`` names."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        run_workers(script, [*arguments, f"--worker={path}"], ranks)
        return json.loads(path.read_text())


def arguments_of(chosen: argparse.Namespace, *names: str) -> list[str]:
    """The options of these names, as a worker's command line has them."""
    return [f"--{name}={getattr(chosen, name)}" for name in names]


def write_found(found: Any, chosen: argparse.Namespace) -> None:
    """For ``found_by_workers``: rank 0 writes what it found."""
    if os.environ["RANK"] == "0":
        chosen.worker.write_text(json.dumps(found))


def versions() -> dict[str, str]:
    """Of Python and the contenders; those not installed are left out."""
    found = {"python": platform.python_version(), DISTRIBUTION: lockstep.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class Report:
    """One table on the screen and one file ``results/NAME.json``.

    The load average is noted at both ends: on a busy machine absolute times mean little.
    """

    def __init__(self, name: str, title: str) -> None:
        self.name = name
        self.title = title
        self.load_before = os.getloadavg()
        self.started = datetime.now(timezone.utc)

    def finish(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        figures: Any,
        settings: Mapping[str, Any],
        output: Path | None,
        notes: Sequence[str] = (),
    ) -> None:
        """Print the table and the notes; write everything to ``output`` (None: the results folder)."""
        table = Table(*columns, title=self.title, title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        console = Console(width=None if sys.stdout.isatty() else 180)
        console.print(table)
        for note in notes:
            console.print(note, style="dim")
        content = {
            "benchmark": self.name,
            "date": self.started.strftime("%Y-%m-%d %H:%M UTC"),
            "command": " ".join(["python", f"benchmarks/{self.name}.py", *sys.argv[1:]]),
            "versions": versions(),
            "machine": {"cores": os.cpu_count(), "architecture": platform.machine()},
            "load_average": {"before": self.load_before, "after": os.getloadavg()},
            "settings": dict(settings),
            "figures": figures,
            "notes": list(notes),
        }
        path = output or RESULTS / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
        console.print(f"written: {os.path.relpath(path)}", style="dim")
