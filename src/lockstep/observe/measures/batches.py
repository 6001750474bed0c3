"""Batches that loaders have handed out and no backward has used: some scripts take several before they train."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple
from weakref import WeakKeyDictionary

MOST_WAITING = 1000
"""Of a loader; of one that is only evaluated with, none is ever used."""


class BatchSize(NamedTuple):
    """Of one batch; None: not known. ``tokens``: of this rank; ``samples``: of all ranks."""

    tokens: int | None
    samples: int | None


class WaitingBatches:
    """First in, first out, for each loader by itself."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[object, deque[BatchSize]] = WeakKeyDictionary()
        self._latest: deque[BatchSize] = deque()

    def comes(self, loader: object | None, size: BatchSize) -> None:
        """``loader`` hands one out; None: one that is gone."""
        key = self if loader is None else loader
        waiting = self._of.get(key)
        if waiting is None:
            waiting = self._of[key] = deque(maxlen=MOST_WAITING)
        waiting.append(size)
        self._latest = waiting

    def use(self, loader: object | None) -> BatchSize | None:
        """A backward uses one of the loader that is iterated, or where none is, of the one that was last; None: there
        is no new one."""
        waiting = self._latest if loader is None else self._of.get(loader)
        return waiting.popleft() if waiting else None
