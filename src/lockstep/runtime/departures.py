"""Which ranks have ended their part of the run, as the watch hears of it."""

from __future__ import annotations

import threading


class Departures:
    """Ranks that have ended well. Written by a side thread, read by the main one."""

    def __init__(self) -> None:
        self._ranks: set[int] = set()
        self._changed = threading.Condition()
        self.is_told = False
        """Whether anybody tells this process of the others' ends: without that there is nothing to wait for."""

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def add(self, rank: int) -> None:
        """This rank has ended."""
        with self._changed:
            self._ranks.add(rank)
            self._changed.notify_all()

    def discard(self, rank: int) -> None:
        """This rank is there again: its process has made another ``Accelerator``."""
        with self._changed:
            self._ranks.discard(rank)

    def ranks(self, patience_s: float = 0.0) -> list[int]:
        """Those that have ended; waits for the first one, whose end is seen sooner than heard of."""
        with self._changed:
            if self.is_told:
                self._changed.wait_for(lambda: bool(self._ranks), patience_s)
            return sorted(self._ranks)
