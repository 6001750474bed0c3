"""Copies of a model on several ranks that should be equal, because all are stepped by the same averages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import UsageError

TOLERANCE = 1e-6
"""Of the sum of magnitudes: more than steps in another order of rounding make, less than gradients of other data."""


class CopiesAlike:
    """Compares the ranks' copies in the second forward, the third, fourth, sixth, tenth, and so on: ever more seldom.

    Averages keep them equal. Gradients and numbers that are a rank's own let them part: of a call of the bare module,
    of ``torch.autograd.grad``, of a hook or an optimizer that keeps what it has seen of the rank's rows.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._module = module
        self._group = group
        self._forwards = 0

    def before_forward(self, trained: list[nn.Parameter]) -> None:
        """Collective; all ranks call it as often.

        Raises:
            UsageError: copies differ. On all ranks alike.
        """
        self._forwards += 1
        last = self._forwards - 2
        if last >= 0 and last & (last - 1) == 0:
            self._compare(trained)

    @torch.no_grad()
    def _compare(self, trained: list[nn.Parameter]) -> None:
        if not trained:
            return
        off = differences(trained, self._group)
        worst = int(off.argmax())
        if off[worst] <= TOLERANCE:
            return
        names: dict[int, Any] = {id(p): name for name, p in self._module.named_parameters()}
        raise UsageError(
            f"'{names.get(id(trained[worst]), '?')}' of {type(self._module).__name__} is no longer equal on all ranks: "
            f"its sums differ by {off[worst].item():.0e}. It was stepped by gradients or numbers that are a rank's "
            "own. Call the model that accelerator.prepare() returned, not the one inside of it; let losses go through "
            "its outputs; and average over the ranks what an optimizer or a hook has of this rank's rows: "
            "accelerator.reduce(tensor, 'mean')."
        )


def differences(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """For each tensor how far its sums on the ranks are apart, of the sum of its magnitudes. Collective."""
    found = torch.stack([torch.stack(_sums(one)) for one in tensors]).to(tensors[0].device)
    both = torch.cat([found, -found]).nan_to_num()
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    most, least = both.chunk(2)
    off: torch.Tensor = (most + least).amax(1) / most[:, 1].clamp_min(torch.finfo(torch.float64).tiny)
    return off


def _sums(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    return values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64)
