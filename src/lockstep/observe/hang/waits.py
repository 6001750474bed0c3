"""Which rank waits for which, from the collectives that each has entered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.observe.hang.records import Evidence, PendingCollective

# Every rank's inputs have equal shapes in these.
EQUAL_SIZES = ("all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Wait:
    """One rank's wait in one collective for those that have not entered it: ``awaited``."""

    rank: int
    collective: PendingCollective
    awaited: frozenset[int]

    @property
    def key(self) -> tuple[object, ...]:
        """What the ranks that meet have in common."""
        one = self.collective
        return (one.group, one.number) if one.number is not None else (one.group, one.operation, one.peer)


class Waits:
    """The waits among the ranks that answered.

    ``ended``: the ranks that have ended, and what they had entered by then, as far as they said it.
    """

    def __init__(
        self,
        seen: Mapping[int, Evidence],
        world_size: int,
        ended: Mapping[int, Evidence | None] | None = None,
    ) -> None:
        self._seen = seen
        self._ended = frozenset(ended or {})
        last = {rank: one for rank, one in (ended or {}).items() if one is not None}
        self._entered = {**last, **seen}
        self._everyone = frozenset(range(world_size))
        self._waits = {
            rank: self._wait(one) for rank, one in sorted(seen.items()) if one.waits and one.pending
        }

    def all(self) -> list[Wait]:
        return list(self._waits.values())

    def ends(self) -> frozenset[int]:
        """Return the ranks that others wait for, directly, and that wait for nobody."""
        awaited = frozenset().union(*(wait.awaited for wait in self._waits.values()))
        return frozenset(rank for rank in awaited if rank not in self._waits or not self._waits[rank].awaited)

    def meeting(self, wait: Wait) -> dict[int, PendingCollective]:
        """Return rank -> its collective of the same group and number, if the ranks' cannot be one and the same; else
        none."""
        mine = wait.collective
        if mine.number is None or mine.peer is not None:
            return {}
        met = {
            rank: other
            for rank, one in sorted(self._seen.items())
            for other in (*one.recent, *one.pending)
            if other.peer is None and (other.group, other.number) == (mine.group, mine.number)
        }
        return {} if all(belong_together(mine, other) for other in met.values()) else met

    def _wait(self, one: Evidence) -> Wait:
        """Return a rank's wait: the oldest pending collective that another rank has not entered."""
        waits = [Wait(one.rank, pending, self._awaited(one, pending)) for pending in one.pending]
        return next((wait for wait in waits if wait.awaited), waits[0])

    def _awaited(self, one: Evidence, pending: PendingCollective) -> frozenset[int]:
        if pending.peer is not None:
            others = frozenset({pending.peer}) & self._everyone
        else:
            members = frozenset(one.groups.get(pending.group, ())) & self._everyone
            others = (members or self._everyone) - {one.rank}
            if pending.number is None and pending.operation == "send/recv":
                # It is the wait of some handle, perhaps of no collective.
                others -= self._ended
        return frozenset(rank for rank in others if not self._has_entered(rank, one.rank, pending))

    def _has_entered(self, rank: int, by: int, pending: PendingCollective) -> bool:
        other = self._entered.get(rank)
        if other is None:
            return False
        if pending.number is not None and pending.peer is None:
            # Collectives of a group are entered in order: with a later one, this one was entered too.
            entered = [theirs.number or 0 for theirs in other.pending if theirs.group == pending.group]
            return max([other.completed.get(pending.group, 0), *entered]) >= pending.number
        if pending.peer is not None:
            return any(theirs.peer == by for theirs in other.pending)
        # Without a number: a send or receive whose other side is not known, or no recorder.
        return other.waits and any(
            theirs.number is None and theirs.operation == pending.operation for theirs in other.pending
        )


def belong_together(one: PendingCollective, other: PendingCollective) -> bool:
    """Return whether two ranks' collectives can be one and the same."""
    if one.operation != other.operation:
        return False
    if not one.operation.lstrip("_").startswith(EQUAL_SIZES):
        return True
    return (one.sizes, one.dtype) == (other.sizes, other.dtype)
