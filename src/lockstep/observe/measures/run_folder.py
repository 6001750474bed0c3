"""The folder of a run: ``measures.jsonl`` and ``events.jsonl``, of one attempt after another.

A run that is continued, because the launcher restarted it or because it loaded a checkpoint, appends to what is there.
One that begins anew moves it aside, to ``run.1``, ``run.2``, ... Which of the two is known at the first step, or when a
state is loaded: until then nothing is written. Rank 0 writes, one ``Accelerator`` for each folder.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from lockstep.history.lines import EVENTS, MEASURES, read_lines
from lockstep.observe.measures.journal import Journal
from lockstep.observe.measures.step import StepMeasures


class RunFolder:
    """Where rank 0 writes what one process of a run measures.

    Attributes:
        attempt: 0 for the first process of a run, 1 for the next; known once writing has begun.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._journal = Journal(path)
        self._before: list[tuple[str, dict[str, Any]]] = []
        self._has_begun = False
        self.attempt = 0

    @property
    def has_begun(self) -> bool:
        """Whether it is settled which attempt this is."""
        return self._has_begun

    @property
    def has_steps(self) -> bool:
        """Whether an earlier process has written steps there."""
        return _has_steps(self.path)

    def begin(self, continues: bool) -> int:
        """Settle which attempt this is, and write what has waited for that; returns the number of attempts before."""
        if self._has_begun:
            return self.attempt
        self._has_begun = True
        try:
            if not continues and _has_steps(self.path):
                _move_aside(self.path)
            self.attempt = sum(line.get("event") == "start" for line in read_lines(self.path / EVENTS))
        except OSError as error:
            # It is said again, once, when something is to be written.
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
        if self._has_begun:
            self._journal.flush()

    def close(self) -> None:
        """Write what waits, and nothing after that."""
        self._journal.close()

    def _append(self, file: str, line: dict[str, object]) -> None:
        if not self._has_begun:
            self._before.append((file, line))
            return
        self._journal.append(file, {**line, "attempt": self.attempt})


class RunWriter:
    """Steps and events of one process of a run, from ``start`` to ``end``.

    Args:
        path: The run's folder.
        world_size: Of this attempt.
        is_restarted: The launcher has started this run again.
        describe: Values of the event ``start``, asked for when writing begins.
    """

    _writers: ClassVar[weakref.WeakValueDictionary[Path, RunWriter]] = weakref.WeakValueDictionary()

    def __init__(
        self,
        path: Path,
        world_size: int,
        is_restarted: bool,
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        RunWriter._writers[path] = self
        self.folder = RunFolder(path)
        self.made = time.time()
        self._world_size = world_size
        self._is_restarted = is_restarted
        self._describe = describe
        self.is_closed = False

    @classmethod
    def has_one(cls, path: Path) -> bool:
        """Return whether this process writes this folder already."""
        return path in cls._writers

    def begin(self, continues: bool) -> None:
        """Settle whether this goes on with the run that is in the folder; only the first call does anything."""
        if self.folder.has_begun or self.is_closed:
            return
        if self.folder.begin(continues or self._is_restarted):
            reason = "restarted by the launcher" if self._is_restarted else "started again"
            self.folder.event("restart", reason=reason, world_size=self._world_size)
        self.folder.event("start", **{**self._describe(), "time": self.made})

    def step(self, step: StepMeasures) -> None:
        """Write a step; with the first, a run that nothing was loaded for begins anew."""
        if not self.is_closed:
            self.begin(continues=False)
            self.folder.step(step.line())

    def event(self, name: str, /, at_once: bool = False, **values: object) -> None:
        """Write an event, or keep it until writing begins."""
        if not self.is_closed:
            self.folder.event(name, at_once, **values)

    def end(self, step: int, reason: str, error: str = "", rank: int = 0) -> None:
        """Write the last events, and nothing after them. A run that failed before its first step is told of, too."""
        if self.is_closed:
            return
        # Where another run's steps are, it is not known whether this one was to go on with it.
        if error and (self._is_restarted or not self.folder.has_steps):
            self.begin(continues=True)
        if self.folder.has_begun:
            if error:
                self.folder.event("error", step=step, sentence=error, rank=rank)
            self.folder.event("end", step=step, reason="error" if error else reason)
        self.close()

    def close(self) -> None:
        """Write what waits."""
        self.is_closed = True
        self.folder.close()
        if RunWriter._writers.get(self.folder.path) is self:
            del RunWriter._writers[self.folder.path]


def bytes_in(folder: str) -> int | None:
    """Return the bytes of the files in a folder and below it; None where there are none on this machine."""
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
