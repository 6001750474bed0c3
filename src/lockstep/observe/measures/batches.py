"""How large batches are, and which of them no backward has used yet: some scripts take several before they train."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary, ref

import torch

from lockstep.runtime.step import BatchCounts, LoaderProgress

MOST_WAITING = 1000
"""Of a loader; of one that is only evaluated with, none is ever used."""


BatchSize = tuple["int | None", "int | None"]
"""Tokens of one batch, of this rank, and its samples, of all ranks; None: not known."""

_Waiting = tuple["int | None", "BatchCounts | None"]


class WaitingBatches:
    """First in, first out, for each loader by itself."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[object, deque[_Waiting]] = WeakKeyDictionary()
        self._latest: deque[_Waiting] = deque()
        self._loader_of_latest: Callable[[], object] = lambda: self._of

    def comes(self, progress: LoaderProgress | None, batch: object) -> None:
        """Take a batch that a loader, which is so far, hands out; None: one that is gone."""
        loader = counts = None
        if progress is not None:
            loader, counts = progress.loader, progress.counts
        key = self if loader is None else loader
        if self._loader_of_latest() is not key:
            self._latest = self._of.setdefault(key, deque(maxlen=MOST_WAITING))
            self._loader_of_latest = ref(key)
        self._latest.append((tokens_in(batch), counts))

    def use(self, loader: object | None) -> BatchSize | None:
        """Use one for a backward: of the loader that is iterated, or else of the one that was last; None: there is no
        new one."""
        is_latest = loader is None or self._loader_of_latest() is loader
        waiting = self._latest if is_latest else self._of.get(loader)
        if not waiting:
            return None
        tokens, counts = waiting.popleft()
        return tokens, None if counts is None else counts.total


TOKEN_NAMES = ("input_ids", "tokens")
"""Entries of a batch that hold tokens."""


def tokens_in(batch: object) -> int | None:
    """Elements of the batch's ``input_ids`` (or ``tokens``), [batch, sequence] or of any shape; None: it has none.

    Padding counts: it costs what other tokens cost. So do rows that only complete a batch.
    """
    if isinstance(batch, (list, tuple)):
        for part in batch:
            # Asked first because it is quick, and most parts are tensors.
            if type(part) is not torch.Tensor and isinstance(part, Mapping):
                return tokens_in(part)
        return None
    if isinstance(batch, (dict, Mapping)):
        for name in TOKEN_NAMES:
            if name in batch:
                count = getattr(batch[name], "numel", None)
                return int(count()) if callable(count) else None
        return None
    count = getattr(getattr(batch, "input_ids", None), "numel", None)
    return int(count()) if callable(count) else None
