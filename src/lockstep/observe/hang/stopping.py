"""How all ranks come to stop at one step boundary, or at once where none of them has made a step.

The order of messages: ``stop`` to every rank; each closes its gate and answers ``passed`` with the boundary that it
passed last; then ``target``, the first boundary that none has passed, to every rank. Where no rank has made
an optimizer step, there is nothing to save: ``stop_now`` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from lockstep.observe.hang.ranks import WatchedRank


class CommonStop:
    """One stop of one set of workers.

    Args:
        running: The ranks that have not ended.
        anyone_came: Whether any rank was ever there.

    Attributes:
        cause: A signal's name; None: nobody has asked.
        nothing_begun: It was asked for before any rank had made a step, so that all may end at once.
    """

    def __init__(
        self, running: Callable[[], Collection[WatchedRank]], anyone_came: Callable[[], bool]
    ) -> None:
        self._running = running
        self._anyone_came = anyone_came
        self._target: int | None = None
        self.cause: str | None = None
        self.nothing_begun = False

    def request(self, cause: str) -> None:
        """Have all ranks stop; asking again changes nothing."""
        if self.cause is not None:
            return
        self.cause = cause
        for state in self._running():
            self.tell(state)
        self.settle()

    def tell(self, state: WatchedRank) -> None:
        """Tell a rank, if a stop is wanted; one that comes later hears of it then."""
        if self.nothing_begun:
            state.peer.send({"kind": "watch.stop_now"})
        elif self.cause is not None:
            state.peer.send({"kind": "watch.stop", "cause": self.cause})

    def settle(self) -> None:
        """Once every rank holds before its next boundary, name the one at which all stop."""
        if self.cause is None or self._target is not None or self.nothing_begun:
            return
        running = self._running()
        if any(state.passed is None for state in running) or (not running and self._anyone_came()):
            return
        if not any(state.passed or state.steps for state in running):
            self.nothing_begun = True
            for state in running:
                self.tell(state)
            return
        self._target = 1 + max(state.passed or 0 for state in running)
        for state in running:
            state.peer.send({"kind": "watch.target", "boundary": self._target})
