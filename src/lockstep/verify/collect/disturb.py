"""Inputs and weights moved by one rounding step: what a run then computes otherwise, rounding explains."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.comm.dtensor import local
from lockstep.comm.tree import Args, Kwargs, map_tensors
from lockstep.verify.rounding import disturbed

WIDE = (torch.float32, torch.float64)
"""A rounding step of a half type is much more than one of these."""


@torch.no_grad()
def disturb_weights(model: nn.Module) -> None:
    """Move each float parameter by one rounding step, in place; exact zeros stay."""
    for parameter in model.parameters():
        values = local(parameter).detach()
        if values.dtype in WIDE:
            values.copy_(disturbed(values))


def disturb_inputs(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Move float inputs by one rounding step: a forward pre-hook."""
    return map_tensors(_moved, args), map_tensors(_moved, kwargs)


def _moved(tensor: Tensor) -> Tensor:
    return disturbed(tensor) if tensor.dtype in WIDE and not tensor.requires_grad else tensor
