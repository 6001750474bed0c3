"""A run of its own, to be watched from outside: ``python -m checkpoint.crash.traced FOLDER RECORD``.

Writes to RECORD what ``Interposer`` saw, and what Python's own audit events told of the same.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpoint.crash.operations import FOR_WRITING, Interposer, Operation
from checkpoint.crash.subject import Scenario, Subject
from lockstep.errors import CheckpointError

SCENARIOS = {
    "numbered": Scenario("numbered", limit=1, blocking=False),
    "one": Scenario("one directory", explicit=True, hooks=True),
}
AUDITED = {
    "os.rename": "rename",
    "os.remove": "unlink",
    "os.rmdir": "rmdir",
    "os.mkdir": "mkdir",
    "open": "open",
}


def main(folder: Path, record: Path) -> None:
    """Numbered saves in the background, then replacements with hooks; one save of each fails and is given up."""
    os.sched_getaffinity = lambda process: {0}
    interposer = Interposer(folder, lambda number, operation: _fails(operation, failing))
    interposer.install()
    failing: list[str] = []
    audited: list[str] = []
    sys.addaudithook(lambda event, args: _audit(audited, folder, event, args) if interposer.armed else None)
    interposer.armed = True
    for name, scenario in SCENARIOS.items():
        place = folder / name
        os.mkdir(place)
        subject = Subject(place, scenario)
        for step in range(3):
            failing[:] = ["state.json"] if step == 1 else []
            subject.advance()
            with suppress(CheckpointError):
                subject.save()
        subject.accelerator.end_training()
    interposer.armed = False
    seen = [f"{one.kind} {one.path}" for one in interposer.log if not one.failed]
    tried = [f"{one.kind} {one.path}" for one in interposer.log if one.kind in AUDITED.values()]
    record.write_text(json.dumps({"seen": seen, "tried": tried, "audited": audited}))


def _fails(operation: Operation, failing: list[str]) -> OSError | None:
    if operation.kind == "sync" and Path(operation.path).name in failing:
        return OSError(5, "made to fail")
    return None


def _audit(audited: list[str], folder: Path, event: str, args: tuple[Any, ...]) -> None:
    if event not in AUDITED or not isinstance(args[0], str | bytes | os.PathLike):
        return
    if event == "open" and not (isinstance(args[2], int) and args[2] & FOR_WRITING):
        return
    path = os.fsdecode(args[0])
    directory = args[-1] if event in ("os.remove", "os.rmdir", "os.mkdir") else -1
    if directory != -1:
        path = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), path)
    path = os.path.abspath(path)
    if path.startswith(f"{folder}/"):
        audited.append(f"{AUDITED[event]} {os.path.relpath(path, folder)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
