"""Gradient clipping of whole windows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

Parameters = torch.Tensor | Iterable[torch.Tensor]


def as_list(parameters: Parameters) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def clip_norm(
    parameters: list[torch.Tensor], max_norm: float, norm_type: float, window_ended: bool
) -> torch.Tensor:
    """Scale gradients so that their total norm is at most ``max_norm``; returns the norm before (0-d).

    Inside an accumulation window (``window_ended`` False) the partial gradients are left alone.
    """
    if not window_ended:
        return get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
    return clip_grad_norm_(parameters, max_norm, norm_type)


def clip_value(parameters: list[torch.Tensor], clip: float, window_ended: bool) -> None:
    """Clamp gradients elementwise to [-clip, clip]; inside an accumulation window nothing happens."""
    if window_ended:
        clip_grad_value_(parameters, clip)
