"""What rank 0 adds to its own numbers: what the watch has told it of the other ranks, without a collective."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.runtime.clock import StepClock


class OtherRanks:
    """Numbers of a step over all ranks: this one's, and those of the others' latest steps that are known.

    Each rank's heartbeats carry the numbers of its latest step; once a second the coordinator tells rank 0 their sums.
    """

    def __init__(self, clock: StepClock, world_size: int) -> None:
        self._clock = clock
        self._world_size = world_size

    def tell(self, own: Mapping[str, float]) -> None:
        """Let the others know this rank's numbers of its latest step, by name."""
        self._clock.own = own

    def of_all(self, name: str, own: float | None) -> float | None:
        """The sum over all ranks of what here is ``own``; None: some are not known."""
        if own is None or self._world_size == 1:
            return own
        sums = self._clock.others.get("sums")
        if not isinstance(sums, Mapping) or not isinstance(sums.get(name), (int, float)):
            return None
        return own + float(sums[name])

    def seconds(self) -> list[float | None] | None:
        """What each rank's own work of a step takes, rank by rank."""
        known = self._clock.others.get("local_s")
        if not isinstance(known, (list, tuple)) or len(known) != self._world_size:
            return None
        return [one if isinstance(one, (int, float)) else None for one in known]
