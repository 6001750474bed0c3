"""Who writes a run down: rank 0, one ``Accelerator`` for each folder."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from lockstep.observe.measures.run_folder import RunFolder
from lockstep.observe.measures.step import StepMeasures


class RunWriter:
    """Steps and events of one process of a run, from ``start`` to ``end``.

    Args:
        path: The run's folder; None, or one that another writer of this process has: nothing is written.
        world_size: Of this attempt.
        is_restarted: The launcher has started this run again.
        describe: Values of the event ``start``, asked for when writing begins.
    """

    _writers: ClassVar[weakref.WeakValueDictionary[Path, RunWriter]] = weakref.WeakValueDictionary()

    def __init__(
        self,
        path: Path | None,
        world_size: int,
        is_restarted: bool,
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        if path in RunWriter._writers:
            path = None
        if path is not None:
            RunWriter._writers[path] = self
        self.folder = RunFolder(path)
        self.made = time.time()
        self._world_size = world_size
        self._is_restarted = is_restarted
        self._describe = describe
        self._is_closed = False

    @property
    def is_on(self) -> bool:
        """Whether anything is written, now or once it has begun."""
        return self.folder.path is not None and not self._is_closed

    def begin(self, continues: bool) -> None:
        """Settle whether this goes on with the run that is in the folder; only the first call does anything."""
        if self.folder.has_begun or not self.is_on:
            return
        if self.folder.begin(continues or self._is_restarted):
            reason = "restarted by the launcher" if self._is_restarted else "started again"
            self.folder.event("restart", reason=reason, world_size=self._world_size)
        self.folder.event("start", **{**self._describe(), "time": self.made})

    def step(self, step: StepMeasures) -> None:
        """Write a step; with the first, a run that nothing was loaded for begins anew."""
        if self.is_on:
            self.begin(continues=False)
            self.folder.step(step.line())

    def event(self, name: str, /, at_once: bool = False, **values: object) -> None:
        """Write an event, or keep it until writing begins."""
        if self.is_on:
            self.folder.event(name, at_once, **values)

    def end(self, step: int, reason: str, error: str = "", rank: int = 0) -> None:
        """Write the last events, and nothing after them. A run that failed before its first step is told of, too."""
        if not self.is_on:
            return
        if error and (self._is_restarted or not self.folder.has_steps):
            self.begin(continues=True)
        if self.folder.has_begun:
            if error:
                self.folder.event("error", step=step, sentence=error, rank=rank)
            self.folder.event("end", step=step, reason="error" if error else reason)
        self.close()

    def close(self) -> None:
        """Write what waits."""
        self._is_closed = True
        self.folder.close()
        path = self.folder.path
        if path is not None and RunWriter._writers.get(path) is self:
            del RunWriter._writers[path]
