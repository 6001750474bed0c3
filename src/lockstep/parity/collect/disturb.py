"""Inputs and weights moved by one rounding step: what a run then computes otherwise, rounding explains."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.comm.dtensor import local
from lockstep.comm.tree import Args, Kwargs, map_tensors

SEED = 0x5EED


def disturbed(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Each float element, of a tensor of any shape, replaced by the next larger or the next smaller one, by chance."""
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    up = torch.rand(tensor.shape, generator=generator).lt(0.5).to(tensor.device)
    to = torch.full_like(tensor, torch.inf)
    return torch.nextafter(tensor, torch.where(up, to, -to))


@torch.no_grad()
def disturb_weights(model: nn.Module) -> None:
    """Move each float parameter by one rounding step, in place; exact zeros stay."""
    generator = torch.Generator().manual_seed(SEED)
    for parameter in model.parameters():
        values = local(parameter).detach()
        if values.dtype in (torch.float32, torch.float64):
            # An exact zero (padding, LoRA's second factor) has a meaning, and its next number is a denormal.
            values.copy_(torch.where(values == 0, values, disturbed(values, generator)))


class DisturbedInputs:
    """A forward pre-hook that moves float inputs by one rounding step."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(SEED + 1)

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return map_tensors(self._moved, args), map_tensors(self._moved, kwargs)

    def _moved(self, tensor: Tensor) -> Tensor:
        # A rounding step of a half type is much more than one of fp32.
        wide = tensor.dtype in (torch.float32, torch.float64) and not tensor.requires_grad
        return disturbed(tensor, self._generator) if wide else tensor
