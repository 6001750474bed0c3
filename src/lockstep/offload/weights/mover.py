"""What brings the weights of groups, and how much room it needs. On a CPU: weights that are mapped from files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lockstep.errors import OffloadError
from lockstep.offload.files.pages import Pages, file_mappings
from lockstep.offload.weights.groups import WeightGroup, enclosing_groups


class Mover(Protocol):
    """Brings the weights of a group to where they are used, and lets them go."""

    def nbytes(self, group: WeightGroup) -> int:
        """Return bytes of the budget that the group takes while it is loaded; always the same number."""

    def load(self, group: WeightGroup) -> None:
        """Bring the group's weights. Called in the background thread."""

    def bind(self, group: WeightGroup) -> None:
        """Make the model use what was loaded. Called in the computing thread before every use."""

    def release(self, group: WeightGroup) -> bool:
        """Let the loaded weights go. Called in the background thread.

        False: something still uses their memory, and nothing has been changed.
        """

    def close(self) -> None:
        """Let everything go, and make the model use its weights at rest. Nothing is called after."""


def least_budget(groups: Sequence[WeightGroup], nbytes: Callable[[WeightGroup], int]) -> int:
    """Return bytes of the groups that must be loaded at once: of one with those in whose forward it is used."""
    outer = enclosing_groups(groups)
    return max((nbytes(group) + sum(map(nbytes, outer[group])) for group in groups), default=0)


def check_budget(sizes: dict[WeightGroup, int], budget: int) -> None:
    """Raise OffloadError where ``budget`` is less than what must be loaded at once."""
    least = least_budget(list(sizes), sizes.__getitem__)
    if least <= budget:
        return
    outer = enclosing_groups(list(sizes))
    group = max(sizes, key=lambda group: sizes[group] + sum(sizes[one] for one in outer[group]))
    besides = "".join(f" and '{one.name}' around it {sizes[one]}" for one in outer[group] if sizes[one])
    raise OffloadError(
        f"The budget for weights is {budget} bytes, but '{group.name}' takes {sizes[group]}{besides}. "
        f"Give {least} bytes or more, or choose smaller blocks."
    )


class MappedMover:
    """Reads the pages of groups' tensors that are mapped from files, and lets them go.

    Tensors that are in memory stay there and take nothing of the budget.
    """

    def __init__(self, groups: Sequence[WeightGroup]) -> None:
        mappings = file_mappings()
        self._pages = {group: Pages(group.tensors.values(), mappings) for group in groups}
        self._stopped = False

    def nbytes(self, group: WeightGroup) -> int:
        return self._pages[group].nbytes

    def load(self, group: WeightGroup) -> None:
        self._pages[group].populate(lambda: self._stopped)

    def bind(self, group: WeightGroup) -> None:
        self._pages[group].check()

    def release(self, group: WeightGroup) -> bool:
        self._pages[group].drop()
        return True

    def stop(self) -> None:
        """Let a ``load`` that is under way return soon, and later ones at once."""
        self._stopped = True

    def close(self) -> None:
        self.stop()
        for pages in self._pages.values():
            pages.drop()
