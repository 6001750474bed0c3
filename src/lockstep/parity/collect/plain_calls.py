"""Calls of torch that a script makes beside its ``Accelerator``: seen, and put right for a process of several ranks."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.parity.collect.place import BatchPlace


class BackwardSeer(Protocol):
    """Is told of each backward."""

    place: BatchPlace

    def plain_backward(self, loss: Tensor) -> float | None:
        """A backward begins: what it is to be multiplied by; None: the ``Accelerator`` has done it."""


def see_backward(seer: BackwardSeer) -> None:
    """Tell of each ``Tensor.backward``, to the end of the process; divide it where it is one rank's of several."""
    original = Tensor.backward

    def backward(self: Tensor, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        factor = seer.plain_backward(self)
        if factor is not None and factor != 1:
            gradient = torch.full_like(self, factor) if gradient is None else gradient * factor
        return original(self, gradient, *args, **kwargs)

    Tensor.backward = backward  # type: ignore[method-assign]


def keep_gradients(module: nn.Module, place: BatchPlace) -> None:
    """Let ``module.zero_grad`` wait where gradients of some ranks wait for those of others."""
    original = module.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        if place.clears():
            original(set_to_none)

    module.zero_grad = zero_grad  # type: ignore[method-assign]
