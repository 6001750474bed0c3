"""Starting one script twice: as a worker is started, and by way of a spare process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.launch import worker_arguments
from lockstep.launch.spare import SpareProcess

LIMIT_S = 120.0


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """What a worker of round 0 gets."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "PYTEST_"))
    }
    worker = {"RANK": "0", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1", "MINE": "a=b", "LOCKSTEP_RESTART": "0"}
    return {**kept, **worker, "LOCKSTEP_IMPORTS_FILE": str(tmp_path / "imports.json"), **more}


def run_cold(command: list[str], environ: Mapping[str, str], output: Path) -> int:
    """Its exit code; standard output and error go to one file."""
    with output.open("wb") as file, open(os.devnull, "rb") as nothing:
        return subprocess.run(
            [sys.executable, *worker_arguments((sys.executable, *command))],
            env=environ, stdin=nothing, stdout=file, stderr=file, start_new_session=True, timeout=LIMIT_S, check=False,
        ).returncode  # fmt: skip


def spare_of(command: list[str], environ: Mapping[str, str], place: Any = None) -> SpareProcess:
    """One that was started in round 0."""
    return SpareProcess((sys.executable, *worker_arguments((sys.executable, *command))), environ, place)


def wait_for(spare: SpareProcess, *states: str) -> str:
    """Until it says that it is in one of these states; returns why."""
    while spare.state not in states:
        spare.receive(1.0)
        ended = spare.state == "unfit" or spare.process.poll() is not None
        spare.receive()
        assert spare.state in states or not ended, (spare.process.returncode, spare.state, spare.why)
    return spare.why


def run_warm(
    command: list[str], first: Mapping[str, str], then: Mapping[str, str], output: Path
) -> tuple[int, str, str]:
    """Exit code, "warm" or "cold", and why; ``then`` are the variables of the round in which the script runs."""
    saved = os.dup(0)
    with (
        output.open("wb") as file,
        output.with_suffix(".kind").open("wb") as kind,
        open(os.devnull, "rb") as nothing,
    ):
        os.dup2(nothing.fileno(), 0)
        try:
            spare = spare_of(command, first, kind)
        finally:
            os.dup2(saved, 0)
            os.close(saved)
        try:
            wait_for(spare, "ready")
            begun = spare.send({"environment": dict(then)}, (file.fileno(), file.fileno()))
            assert begun, (spare.process.poll(), spare.state, spare.why)
            why = wait_for(spare, "warm", "cold")
            return spare.process.wait(LIMIT_S), spare.state, why
        finally:
            spare.end()
