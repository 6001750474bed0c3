"""A capsule, replayed by the user's own script in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lockstep.replay.run import ReplaySpec
from lockstep.replay.verdict import ReplayVerdict
from lockstep.script.process import ScriptProcess
from lockstep.verify.runs import CouldNotRun

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
    path = spec.write(folder / "spec.json")
    started = ScriptProcess(["-m", WORKER, str(path), *program], folder / "output.txt", {}, timeout_s)
    try:
        code = started.wait()
    finally:
        started.end()
    if code is None:
        raise CouldNotRun(
            f"{program[0]} has not made its first step in {timeout_s:g} s. Give it more time with "
            f"--timeout.{started.tail()}"
        )
    if code or not Path(spec.output).exists():
        raise CouldNotRun(f"{program[0]} failed: {started.how_it_failed(code)}{started.tail()}")
    return ReplayVerdict.of(json.loads(Path(spec.output).read_text("utf-8")))
