"""Axes: where a value lies between 0 and 1, and which values are written beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lockstep.history.columns import FloatArray
from lockstep.words import bytes_text, digits, duration, short

Label = Callable[[float], str]
LOG_FROM = 30.0
"""A curve of positive values gets a logarithmic axis if its greatest is so many times its usual one."""
NICE = (1.0, 2.0, 2.5, 5.0, 10.0)
SECONDS = (
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    10800,
    21600,
    43200,
    86400,
    172800,
    604800,
)
LABELS: dict[str, Label] = {
    "count": short,
    "number": digits,
    "seconds": duration,
    "bytes": bytes_text,
}
"""Kind of a quantity -> how its values are written."""


@dataclass(frozen=True)
class Scale:
    """From ``low`` to ``high``, both finite; ``low`` > 0 where it is ``log``."""

    low: float
    high: float
    kind: str = "number"
    log: bool = False

    def places(self, values: FloatArray) -> FloatArray:
        """0 at ``low``, 1 at ``high``; what lies outside is put on the edge."""
        low, high = self.low, self.high
        if self.log:
            values = np.log10(np.maximum(values, low))
            low, high = math.log10(low), math.log10(high)
        return np.clip((values - low) / (high - low), 0.0, 1.0)

    def place(self, value: float) -> float:
        return float(self.places(np.array([value]))[0])

    def ticks(self, count: int = 4) -> list[tuple[float, str]]:
        """(place, text) of about so many values that are easy to read."""
        values = self._decades(count) if self.log else self._even(count)
        return [(self.place(value), LABELS[self.kind](value)) for value in values]

    def _decades(self, count: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        steps = (1.0, 2.0, 5.0) if last - first <= 2 else (1.0,)
        every = max(1, math.ceil((last - first) / count))
        values = [step * 10.0**power for power in range(first, last + 1, every) for step in steps]
        return [value for value in values if self.low <= value <= self.high]

    def _even(self, count: int) -> list[float]:
        span = self.high - self.low
        if self.kind == "seconds" and span > SECONDS[0] * count:
            step = float(next((one for one in SECONDS if one * count >= span), SECONDS[-1]))
            while span / step > count:
                step *= 2
        else:
            power = 10.0 ** math.floor(math.log10(span / count))
            # 0.999, as a step that is just enough must not fail by rounding.
            step = next(nice * power for nice in NICE if nice * power * count >= span * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def scale_of(values: FloatArray, kind: str, from_zero: bool = False, may_log: bool = False) -> Scale:
    """A scale on which all finite ``values`` lie, with a little room."""
    known = values[np.isfinite(values)]
    # Differences of greater ones overflow.
    known = known[np.abs(known) < 1e300]
    if not len(known):
        return Scale(0.0, 1.0, kind)
    low, high = float(known.min()), float(known.max())
    if may_log and low > 0 and high > LOG_FROM * float(np.median(known)):
        return Scale(low / 1.2, high * 1.2, kind, log=True)
    if from_zero and low >= 0:
        return Scale(0.0, high * 1.05 or 1.0, kind)
    room = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low - room, high + room, kind)


def span_of(values: FloatArray, kind: str) -> Scale:
    """From the least to the greatest of finite ``values`` exactly: for an axis of steps or of time."""
    known = values[np.isfinite(values)]
    if not len(known):
        return Scale(0.0, 1.0, kind)
    low, high = float(known.min()), float(known.max())
    return Scale(low, high if high > low else low + 1.0, kind)
