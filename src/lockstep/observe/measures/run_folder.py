"""The folder of a run: ``measures.jsonl`` and ``events.jsonl``, of one attempt after another.

A run that is continued, because the launcher restarted it or because it loaded a checkpoint, appends to what is there.
One that begins anew moves it aside, to ``run.1``, ``run.2``, ... Which of the two is known at the first step, or when a
state is loaded: until then nothing is written.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lockstep.history.lines import EVENTS, MEASURES, read_lines
from lockstep.observe.measures.journal import Journal


class RunFolder:
    """Where rank 0 writes what one process of a run measures; with ``path`` None nothing is written.

    Attributes:
        attempt: 0 for the first process of a run, 1 for the next; known once writing has begun.
    """

    def __init__(self, path: Path | None) -> None:
        self._journal = None if path is None else Journal(path)
        self._before: list[tuple[str, dict[str, Any]]] = []
        self._has_begun = False
        self.attempt = 0

    @property
    def path(self) -> Path | None:
        """The folder; None: nothing is written."""
        return None if self._journal is None else self._journal.folder

    @property
    def has_begun(self) -> bool:
        """Whether it is settled which attempt this is."""
        return self._has_begun

    @property
    def has_steps(self) -> bool:
        """Whether an earlier process has written steps there."""
        return self._journal is not None and _has_steps(self._journal.folder)

    def begin(self, continues: bool) -> int:
        """Settle which attempt this is, and write what has waited for that; returns the number of attempts before."""
        if self._has_begun:
            return self.attempt
        self._has_begun = True
        if self._journal is None:
            return 0
        folder = self._journal.folder
        try:
            if not continues and _has_steps(folder):
                _move_aside(folder)
            self.attempt = sum(line.get("event") == "start" for line in read_lines(folder / EVENTS))
        except OSError as error:  # said again, once, when something is to be written
            self._journal.note(error)
        for file, line in self._before:
            self._journal.append(file, {**line, "attempt": self.attempt})
        self._before.clear()
        return self.attempt

    def step(self, line: dict[str, Any]) -> None:
        """Append the line of a step."""
        self._append(MEASURES, line)

    def event(self, name: str, /, at_once: bool = False, **values: object) -> None:
        """Append an event; what is None is left out. ``at_once``: it is in the file when this returns."""
        line = {"event": name, "time": time.time(), **values}
        self._append(EVENTS, {key: value for key, value in line.items() if value is not None})
        if at_once:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._journal is not None and self._has_begun:
            self._journal.flush()

    def close(self) -> None:
        """Write what waits, and nothing after that."""
        if self._journal is not None:
            self._journal.close()

    def _append(self, file: str, line: dict[str, object]) -> None:
        if self._journal is None:
            return
        if not self._has_begun:
            self._before.append((file, line))
            return
        self._journal.append(file, {**line, "attempt": self.attempt})


def bytes_in(folder: str) -> int | None:
    """Of the files in a folder and those below it; None where it is none of this file system."""
    try:
        found = [entry.stat().st_size for entry in Path(folder).rglob("*") if entry.is_file()]
    except OSError:
        return None
    return sum(found) if found else None


def _has_steps(folder: Path) -> bool:
    return (folder / MEASURES).exists()


def _move_aside(folder: Path) -> None:
    number = 1
    while folder.with_name(f"{folder.name}.{number}").exists():
        number += 1
    folder.rename(folder.with_name(f"{folder.name}.{number}"))
