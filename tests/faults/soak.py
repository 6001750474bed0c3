"""Runs a training under faults and compares it with one without: samples, parameters, reports, times."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.command import LOCKSTEP

from .kinds import Fault

SCRIPT = Path(__file__).parent / "training.py"
RANKS = 2
DISK_MIB = 8
START_LIMIT_S = 180.0
IN_FLIGHT_S = 0.05  # a save that was under way when the fault struck may still be committed


@dataclass
class Outcome:
    """What a soak found. ``unnamed`` are the faults of which nobody told rank and cause.

    ``recovery_s``: by kind of fault, seconds from the fault to the next checkpoint that was committed.
    """

    starts: int = 0
    struck: int = 0
    lost: int = 0
    repeated: int = 0
    equal_parameters: bool = False
    orphans: int = 0
    recovery_s: dict[str, list[float]] = field(default_factory=dict)
    unnamed: list[str] = field(default_factory=list)
    seconds: float = 0.0


@contextmanager
def small_disk(directory: Path) -> Any:
    """``directory`` as a file system of its own with ``DISK_MIB``; a plain directory where that is not allowed."""
    directory.mkdir()
    mounted = os.geteuid() == 0 and not subprocess.call(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(directory)],
        stderr=subprocess.DEVNULL,
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.call(["umount", "-l", str(directory)])


def can_fill_a_disk(directory: Path) -> bool:
    """Whether this machine lets us have a disk that may get full."""
    with small_disk(directory) as mounted:
        return bool(mounted)


def soak(
    directory: Path,
    steps: int,
    faults: list[Fault],
    pause_s: float = 0.0,
    progress: Callable[[int], None] = lambda n: None,
) -> Outcome:
    """Train ``steps`` steps with 2 ranks; start the same command again as long as it ends otherwise than well.

    That is what a supervisor (systemd, Slurm's requeue, Kubernetes) does, and the only one to do anything.
    """
    outcome = Outcome()
    directory.mkdir()
    plan = {"steps": steps, "pause_s": pause_s, "faults": [asdict(fault) for fault in faults]}
    (directory / "plan.json").write_text(json.dumps(plan))
    began = time.monotonic()
    reports = ""
    with small_disk(directory / "disk"):
        while not (directory / "complete").exists():
            reports += _start(directory, outcome)
            progress(len(list(directory.glob("fault-*"))))
            assert outcome.starts <= len(faults) + 3, f"the run does not come to its end:\n{reports[-4000:]}"
    outcome.seconds = time.monotonic() - began
    _examine(directory, faults, reports, outcome)
    return outcome


def _start(directory: Path, outcome: Outcome) -> str:
    """One start of the command until it ends; its error output."""
    outcome.starts += 1
    command = [*LOCKSTEP, "launch", "--nproc", str(RANKS), "--cpu"]
    command += ["--max-restarts", "1000", "--hang-timeout", "7", "--grace", "20", str(SCRIPT), str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (directory / f"errors-{outcome.starts}").open("w+") as errors:
        process = subprocess.Popen(command, stderr=errors, env=environment)
        code = process.wait(START_LIMIT_S * 10)
        time.sleep(2.0 if code < 0 else 0)  # nothing may be left 2 s after the launcher
        outcome.orphans += _workers(directory)
        errors.seek(0)
        return errors.read()


def _workers(directory: Path) -> int:
    """Processes that still train in ``directory``."""
    found = subprocess.run(
        ["pgrep", "-f", f"{SCRIPT} {directory}$"], capture_output=True, text=True, check=False
    )
    return len(found.stdout.split())


def _examine(directory: Path, faults: list[Fault], reports: str, outcome: Outcome) -> None:
    outcome.struck = len(list(directory.glob("fault-*")))
    outcome.lost, outcome.repeated = _count_samples(directory)
    commits = [line.split() for line in (directory / "commits").read_text().splitlines()]
    times = [float(when) for _, when in commits]
    said = reports.lower()
    for fault in faults:
        struck = float((directory / f"fault-{fault.number}").read_text())
        later = [when - struck for when in times if when > struck + fault.delay_s + IN_FLIGHT_S]
        outcome.recovery_s.setdefault(fault.kind, []).extend(later[:1])
        if not any(all(word in line for word in fault.words()) for line in said.splitlines() or [""]):
            outcome.unnamed.append(f"{fault.kind} on rank {fault.rank} at step {fault.step}")


def ledger(directory: Path, rank: int) -> dict[int, list[int]]:
    """Samples of each step; of a step that ran again after a fault, those of the last time."""
    lines = [json.loads(line) for line in (directory / f"ledger-{rank}.jsonl").read_text().splitlines()]
    return {step: samples for step, *samples in lines}


def _count_samples(directory: Path) -> tuple[int, int]:
    """(lost, repeated) over the two epochs of the run that led to its end."""
    plan = json.loads((directory / "plan.json").read_text())
    ledgers = [ledger(directory, rank) for rank in range(RANKS)]
    half = plan["steps"] // 2
    lost = repeated = 0
    for epoch in (range(1, half + 1), range(half + 1, plan["steps"] + 1)):
        seen = [sample for part in ledgers for step in epoch for sample in part.get(step, [])]
        expected = half * 4 * RANKS
        lost += expected - len(set(seen))
        repeated += len(seen) - len(set(seen))
    return lost, repeated


def compare(directory: Path, undisturbed: Path, outcome: Outcome) -> None:
    """Whether both ended with the same bits, having seen the same samples at each step."""
    weights = [torch.load(path / "weights.pt", weights_only=True) for path in (directory, undisturbed)]
    outcome.equal_parameters = all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    for rank in range(RANKS):
        assert ledger(directory, rank) == ledger(undisturbed, rank), f"rank {rank} saw other samples"
