"""A capsule, replayed by the user's own script in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.config.sources import inherited_environment
from lockstep.parity.runs import LAST_LINES, OF_LAUNCHERS, OWN_ERROR, CouldNotRun
from lockstep.replay.run import ReplaySpec
from lockstep.replay.verdict import ReplayVerdict

WORKER = "lockstep.replay.worker"


def replay(
    spec: ReplaySpec, program: Sequence[str], folder: Path, timeout_s: float = 3600.0
) -> ReplayVerdict:
    """Make the step of a capsule again.

    Args:
        program: The script, or the module, and its arguments.
        folder: For what the process writes.

    Raises:
        CouldNotRun: there is no answer; the message says why.
    """
    path, log = spec.write(folder / "spec.json"), folder / "output.txt"
    environ = {name: value for name, value in inherited_environment().items() if name not in OF_LAUNCHERS}
    with log.open("wb") as output:
        started = subprocess.Popen(
            [sys.executable, "-m", WORKER, str(path), *program],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
        try:
            code = started.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise CouldNotRun(
                f"{program[0]} has not made its first step in {timeout_s:g} s. Give it more with --timeout.{_tail(log)}"
            ) from None
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
    if code or not Path(spec.output).exists():
        said = OWN_ERROR.findall(log.read_text("utf-8", "replace"))
        how = said[-1] if said else f"exit code {code}."
        raise CouldNotRun(f"{program[0]} failed: {how}{_tail(log)}")
    return ReplayVerdict.of(json.loads(Path(spec.output).read_text("utf-8")))


def _tail(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").rstrip().splitlines()[-LAST_LINES:]
    return "\n  ".join(["\nIts last lines:", *lines]) if lines else ""
