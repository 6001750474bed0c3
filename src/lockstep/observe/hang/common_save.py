"""A save of all ranks at one step boundary, after which training goes on, because somebody has asked for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lockstep.observe.hang.ranks import WatchedRank

ANSWER_LIMIT_S = 10.0
UNDER_WAY = "a save is under way already"


class CommonSave:
    """One save after the other.

    The order of messages: ``save`` to every rank; each closes its gate and answers ``may_save`` with the boundary that
    it passed last; then ``save_at``, the first boundary that none has passed, to every rank, or ``no_save`` if a rank
    has gone or has not answered in time. After ``save_at`` nothing takes it back: some rank may save already. Each
    tells what came of it, ``saved``; the next save waits for all of them.

    Args:
        running: The ranks that have not ended.
        tell: Is told in a sentence what came of a save.
    """

    def __init__(self, running: Callable[[], Mapping[int, WatchedRank]], tell: Callable[[str], None]) -> None:
        self._running = running
        self._tell = tell
        self._number = 0
        self._asked: float | None = None
        self._ranks: frozenset[int] = frozenset()
        self._passed: dict[int, int] = {}
        self._saved: dict[int, str] = {}
        self._has_target = False

    def request(self, cause: str, now: float) -> str:
        """Have all ranks save at one boundary; returns why not, in a clause, or ""."""
        running = self._running()
        if self._asked is not None:
            return UNDER_WAY
        if not any(state.steps or state.boundaries for state in running.values()):
            return "no rank has made a step yet, so there is nothing to save"
        self._number += 1
        self._asked, self._ranks = now, frozenset(running)
        self._passed, self._saved, self._has_target = {}, {}, False
        for state in running.values():
            state.peer.send({"kind": "watch.save", "cause": cause, "number": self._number})
        return ""

    def passed(self, rank: int, number: object, boundary: int) -> None:
        """A rank's answer."""
        if self._asked is None or self._has_target or number != self._number or rank not in self._ranks:
            return
        self._passed[rank] = boundary
        if self._passed.keys() == self._ranks:
            self._has_target = True
            self._send({"kind": "watch.save_at", "boundary": 1 + max(self._passed.values())})

    def saved(self, rank: int, sentence: str) -> None:
        """A rank tells what came of it."""
        if self._asked is None or not self._has_target or rank not in self._ranks:
            return
        self._saved[rank] = sentence
        if self._saved.keys() == self._ranks:
            self._asked = None
            self._tell(self._saved[min(self._ranks)])

    def look(self, now: float) -> None:
        """Withdraw a save that a rank has left, or has not answered in time; forget one whose ranks have gone."""
        if self._asked is None:
            return
        gone = self._ranks - self._running().keys() - self._saved.keys()
        if self._has_target:
            if gone:
                self._asked = None
                self._tell("A rank has ended before the save was complete.")
        elif gone:
            self.withdraw("a rank has ended meanwhile")
        elif now - self._asked > ANSWER_LIMIT_S:
            missing = sorted(self._ranks - self._passed.keys())
            self.withdraw(f"rank {missing[0]} does not answer")

    def withdraw(self, why: str) -> None:
        """Save nothing, if no boundary was named yet; ``why``: a clause."""
        if self._asked is not None and not self._has_target:
            self._asked = None
            self._send({"kind": "watch.no_save"})
            self._tell(f"Nothing was saved: {why}.")

    def _send(self, message: dict[str, object]) -> None:
        for state in self._running().values():
            state.peer.send(message)
