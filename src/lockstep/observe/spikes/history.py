"""How far a number is above those before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

NORMAL_MAD = 1.4826
"""A normal distribution's standard deviation over its MAD."""

LEAST_SPREAD = 1e-3
"""Of the median: numbers that hardly differ are no measure of what is far."""


class RecentValues:
    """The latest numbers of steps that were made, all finite.

    Reference: Iglewicz, Hoaglin, How to Detect and Handle Outliers, 1993 (modified z-scores).
    """

    def __init__(self, window: int, warmup: int) -> None:
        self._values: deque[float] = deque(maxlen=window)
        self._warmup = warmup

    def add(self, value: float) -> None:
        self._values.append(value)

    def score(self, value: float) -> float | None:
        """Compute (value - median) / (1.4826 * MAD); None before there are enough numbers.

        The divisor is at least a thousandth of the median.
        """
        if len(self._values) < self._warmup:
            return None
        middle, mad = self.median_and_mad()
        spread = max(NORMAL_MAD * mad, LEAST_SPREAD * abs(middle))
        if spread == 0:
            return 0.0 if value <= middle else float("inf")
        return (value - middle) / spread

    def median_and_mad(self) -> tuple[float, float]:
        """Return the median and the median absolute deviation of at least one number."""
        middle = median(self._values)
        return middle, median([abs(one - middle) for one in self._values])

    def values(self) -> list[float]:
        """Return the values from the oldest on."""
        return list(self._values)

    def replace(self, values: Iterable[float]) -> None:
        """Have these; of too many the latest."""
        self._values.clear()
        self._values.extend(values)
