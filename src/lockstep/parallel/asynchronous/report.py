"""How stale the gradients were that a run applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class StalenessReport:
    """Of all ranks' gradients that were applied, each once.

    The staleness of a gradient is the number of updates between the parameters that it was computed on and those
    that it was applied to.

    Args:
        bound: No gradient may be staler.
        histogram: Staleness -> number of gradients.
        waits: How often this rank had to wait for an update, because it would have run too far ahead.
        bytes_sent: By this rank.
    """

    bound: int
    histogram: Mapping[int, int]
    waits: int
    bytes_sent: int

    @property
    def gradients(self) -> int:
        return sum(self.histogram.values())

    @property
    def maximum(self) -> int:
        return max(self.histogram, default=0)

    @property
    def mean(self) -> float:
        return sum(stale * count for stale, count in self.histogram.items()) / max(1, self.gradients)

    def __str__(self) -> str:
        shares = ", ".join(
            f"{stale}: {count / self.gradients:.0%}" for stale, count in sorted(self.histogram.items())
        )
        return (
            f"{self.gradients} gradients, staleness at most {self.maximum} (bound {self.bound}), mean {self.mean:.2f}"
            f"{f' ({shares})' if shares else ''}; {self.waits} waits"
        )
