"""Gradient clipping of whole windows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.nn.utils import clip_grads_with_norm_

from lockstep.comm.dtensor import local, total_norm

Parameters = torch.Tensor | Iterable[torch.Tensor]


def as_list(parameters: Parameters) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def clip_norm(
    parameters: list[torch.Tensor], max_norm: float, norm_type: float, window_ended: bool
) -> torch.Tensor:
    """Scale gradients so that their total norm is at most ``max_norm``; returns the norm before (0-d).

    The norm is that of the whole gradients, also where each rank holds a shard of them; then it is collective.
    Inside an accumulation window (``window_ended`` False) the partial gradients are left alone.
    """
    norm = total_norm((p.grad for p in parameters if p.grad is not None), float(norm_type))
    if window_ended:
        clip_grads_with_norm_(_local_gradients(parameters), max_norm, norm)
    return norm


def clip_value(parameters: list[torch.Tensor], clip: float, window_ended: bool) -> None:
    """Clamp gradients elementwise to [-clip, clip]; inside an accumulation window nothing happens."""
    if window_ended:
        torch.nn.utils.clip_grad_value_(_local_gradients(parameters), clip)


class _LocalGradient(NamedTuple):
    """What torch's clipping functions look at of a parameter: here this rank's part of its gradient."""

    grad: torch.Tensor


def _local_gradients(parameters: list[torch.Tensor]) -> Any:
    return [_LocalGradient(local(p.grad)) for p in parameters if p.grad is not None]
