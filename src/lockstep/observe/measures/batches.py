"""How large batches are, and which of them no backward has used yet: some scripts take several before they train."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
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


TOKEN_NAMES = ("input_ids", "tokens")
"""Entries of a batch that hold tokens."""


def tokens_in(batch: object) -> int | None:
    """Elements of the batch's ``input_ids`` (or ``tokens``), [batch, sequence] or of any shape; None: it has none.

    Padding counts: it costs what other tokens cost. So do rows that only complete a batch.
    """
    if isinstance(batch, Mapping):
        for name in TOKEN_NAMES:
            if name in batch:
                count = getattr(batch[name], "numel", None)
                return int(count()) if callable(count) else None
        return None
    if isinstance(batch, (list, tuple)):
        for part in batch:
            if isinstance(part, Mapping):
                return tokens_in(part)
        return None
    count = getattr(getattr(batch, "input_ids", None), "numel", None)
    return int(count()) if callable(count) else None
