"""What brings the weights of units, and how much room it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lockstep.errors import OffloadError
from lockstep.offload.weights.groups import WeightGroup, around


class Mover(Protocol):
    """Brings the weights of a unit to where they are used, and lets them go."""

    def nbytes(self, unit: WeightGroup) -> int:
        """Bytes of the budget that the unit takes while it is loaded; always the same number."""

    def load(self, unit: WeightGroup) -> None:
        """Bring the unit's weights. Called in the background thread."""

    def bind(self, unit: WeightGroup) -> None:
        """Make the model use what was loaded. Called in the computing thread before every use."""

    def release(self, unit: WeightGroup) -> bool:
        """Let the loaded weights go. Called in the background thread, or by ``Streamer.invalidate``.

        False: something still uses their memory, and nothing has been changed.
        """

    def close(self) -> None:
        """Let everything go, and make the model use its weights at rest. Nothing is called after."""


def least_budget(units: Sequence[WeightGroup], nbytes: Callable[[WeightGroup], int]) -> int:
    """Bytes of the units that must be loaded at once: of one with those in whose forward it is used."""
    outer = around(units)
    return max((nbytes(unit) + sum(map(nbytes, outer[unit])) for unit in units), default=0)


def check_budget(sizes: dict[WeightGroup, int], budget: int) -> None:
    """Raise OffloadError where ``budget`` is less than what must be loaded at once."""
    least = least_budget(list(sizes), sizes.__getitem__)
    if least <= budget:
        return
    outer = around(list(sizes))
    unit = max(sizes, key=lambda unit: sizes[unit] + sum(sizes[one] for one in outer[unit]))
    besides = "".join(f" and '{one.name}' around it {sizes[one]}" for one in outer[unit] if sizes[one])
    raise OffloadError(
        f"The budget for weights is {budget} bytes, but '{unit.name}' takes {sizes[unit]}{besides}. "
        f"Give {least} bytes or more, or choose smaller blocks."
    )
