"""What each rank's batches add to the gradients of a step, where one process has those of all ranks in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from lockstep.parity.trace.sketch import row_sketch

SAME = 1e-3
"""Relative distance up to which a gradient is the sum of what the ranks' batches have added."""


class RankGradients:
    """Of all parameters that are watched, as sketches: of a matrix 8 numbers a row.

    Args:
        whose: Tells the rank whose turn it is.
    """

    def __init__(self, ranks: int, whose: Callable[[], int]) -> None:
        self._ranks = ranks
        self._whose = whose
        self._found: dict[str, dict[int, Tensor]] = {}

    def watch(self, name: str, parameter: Tensor) -> None:
        """Take note of each gradient that a backward brings to a parameter."""
        if parameter.requires_grad and not parameter.is_meta:
            parameter.register_hook(partial(self._add, name))

    def _add(self, name: str, gradient: Tensor) -> None:
        of_ranks, rank, more = self._found.setdefault(name, {}), self._whose(), row_sketch(gradient)
        of_ranks[rank] = of_ranks[rank] + more if rank in of_ranks else more

    def of_ranks(self, name: str, gradient: Tensor) -> Iterator[Tensor]:
        """Sketches of the gradients that each rank has before they are averaged, if their mean is ``gradient``.

        None where the script has changed it otherwise than by a factor, or has not cleared it.
        """
        found = self._found.pop(name, None)
        if found is None:
            return
        whole, total = row_sketch(gradient), sum(found.values())
        if not isinstance(total, Tensor) or total.shape != whole.shape or not bool(total.any()):
            return
        # The factor that fits best, such as that of a mean or of clipping.
        factor = (whole * total).sum() / total.square().sum()
        if bool((whole - factor * total).norm() > SAME * whole.norm()):
            return
        # So scaled, their mean over the ranks is the gradient.
        for rank in range(self._ranks):
            yield found[rank] * factor * self._ranks if rank in found else whole.new_zeros(whole.shape)
