"""Whether a round that failed is followed by another one. Pure: causes and numbers of checkpoints in."""

from __future__ import annotations

from dataclasses import dataclass

STALLED_ROUNDS = 3


@dataclass(frozen=True)
class Decision:
    """``again``: form another round. ``sentence``: what to tell people; may be empty where the run ends."""

    again: bool
    sentence: str


class Restarts:
    """Counts rounds that failed.

    Args:
        most: how many failures are followed by another round.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._commits: int | None = 0
        self._stalled = 0
        self.done = 0

    def round_started(self, commits: int | None) -> None:
        """``commits``: checkpoints so far in this launch; None where nobody counts them."""
        self._commits = commits

    def round_failed(self, cause: str, commits: int | None) -> Decision:
        """What follows a round that failed because of ``cause`` (a clause such as ``rank 1 failed (...)``)."""
        # not known is not the same as none
        stalled = commits is not None and self._commits is not None and commits <= self._commits
        self._stalled = self._stalled + 1 if stalled else 0
        if self.done >= self._most:
            used = f"All {self._most} restarts were used." if self._most > 1 else "The one restart was used."
            return Decision(False, used if self._most else "")
        if self._stalled >= STALLED_ROUNDS:
            return Decision(
                False,
                f"{STALLED_ROUNDS} rounds in a row ended without a new checkpoint, so another restart would not "
                f"help. Find the cause first, or save more often.",
            )
        self.done += 1
        return Decision(True, f"restart {self.done} of {self._most}: {cause}; resuming")
