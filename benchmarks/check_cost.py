"""What a step costs while ``lockstep check`` looks on, beside the same step alone: for ``check.py``."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import common

SCRIPT = common.BENCHMARKS / "check_training.py"
SIZE = ("--size", "384", "8", "2048", "--length", "128", "--batch-size", "4")
STEPS = 8
WARM = 2
TIMEOUT_S = 600


class StepCost(NamedTuple):
    """Of the processes that train with one strategy: medians over the rounds."""

    strategy: str
    plain_s: float
    step_ratio: float
    memory_ratio: float


def cost(strategy: str, rounds: int, folder: Path) -> StepCost:
    """A llama of 11 M parameters on 2 ranks, trained alone and as the candidate of a check, in turns."""
    plain, ratios, memory = [], [], []
    for number in range(rounds):
        found = {
            command: _last_process(command, strategy, folder / f"{strategy}-{command}-{number}")
            for command in (("launch", "check") if number % 2 else ("check", "launch"))
        }
        plain.append(found["launch"][0])
        ratios.append(found["check"][0] / found["launch"][0])
        memory.append(found["check"][1] / found["launch"][1])
    return StepCost(strategy, *(common.summary(values).median for values in (plain, ratios, memory)))


def _last_process(command: str, strategy: str, times: Path) -> tuple[float, float]:
    """Median seconds of a step and peak bytes of rank 0 of the last run that ``command`` made."""
    steps = ["--steps", str(STEPS)]
    of_check, of_script = (steps, []) if command == "check" else ([], steps)
    words = [*common.LOCKSTEP, command, "--nproc", "2", "--cpu"]
    script = [str(SCRIPT), "llama", *SIZE, f"--times={times}"]
    subprocess.run(
        [*words, "--parallel", strategy, *of_check, *script, *of_script],
        check=True,
        capture_output=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = [json.loads(line) for line in times.read_text().splitlines()]
    last = lines[-1][0]
    began = [when for process, when, _ in lines if process == last]
    seconds = [after - before for before, after in itertools.pairwise(began)][WARM:]
    return common.summary(seconds).median, max(peak for process, _, peak in lines if process == last)
