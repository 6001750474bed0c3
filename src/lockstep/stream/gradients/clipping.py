"""Clipping of gradients that may lie in files."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lockstep.comm.dtensor import local
from lockstep.stream.direct import aligned_buffer
from lockstep.stream.step.regions import Region, read_all, region_to_move, write_all


@torch.no_grad()
def clip_offloaded(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_``, with the same result to the last bit; returns the norm before (0-d).

    Of plain gradients: where ranks hold shards, take the norm over all ranks and call ``scale_offloaded``.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = get_total_norm(gradients, float(norm_type), error_if_nonfinite)
    scale_offloaded(gradients, max_norm, norm)
    return norm


@torch.no_grad()
def scale_offloaded(gradients: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """``torch.nn.utils.clip_grads_with_norm_`` of gradients, this rank's shards of them.

    Those in files are read and written back one by one, past the page cache; none if they need no scaling.
    """
    buffer = torch.empty(0, dtype=torch.uint8)
    in_memory: list[torch.Tensor] = []
    moved: list[tuple[torch.Tensor, Region]] = []
    for gradient in map(local, gradients):
        region = region_to_move(gradient, changes=True)
        if region is None:
            in_memory.append(gradient)
        else:
            moved.append((gradient, region))
    _scale(in_memory, max_norm, norm)
    if not moved or bool(float(max_norm) / (norm + 1e-6) >= 1.0):
        return
    for gradient, region in moved:
        if buffer.numel() < region.nbytes:
            buffer = aligned_buffer(region.nbytes)
        read_all([region], buffer)
        _scale([region.within(buffer)], max_norm, norm)
        write_all([region], buffer)
        torch.autograd.graph.increment_version(gradient)


def _scale(gradients: list[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    holders: Any = [SimpleNamespace(grad=gradient) for gradient in gradients]
    clip_grads_with_norm_(holders, max_norm, norm)
