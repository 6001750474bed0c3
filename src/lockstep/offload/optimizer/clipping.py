"""Clipping of gradients that may lie in files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lockstep.comm.dtensor import local
from lockstep.offload.files.direct import aligned, aligned_buffer, region_of
from lockstep.offload.optimizer.regions import StepRegion, read_all, region_to_move, write_all


@torch.no_grad()
def norm_of(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """``torch.nn.utils.get_total_norm`` of plain tensors, to the last bit; those in files are let go one by one."""
    regions = [region_of(gradient) for gradient in gradients]
    if not any(regions):
        return get_total_norm(gradients, norm_type)
    norms = []
    for gradient, region in zip(gradients, regions, strict=True):
        norms.append(torch.linalg.vector_norm(gradient, norm_type))
        if region is not None:
            file, offset = region
            file.drop(offset, aligned(gradient.nbytes))
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


@torch.no_grad()
def scale_offloaded(gradients: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """``torch.nn.utils.clip_grads_with_norm_`` of gradients, this rank's shards of them.

    Those in files are read and written back one by one, past the page cache; none if they need no scaling.
    """
    buffer = torch.empty(0, dtype=torch.uint8)
    in_memory: list[torch.Tensor] = []
    moved: list[tuple[torch.Tensor, StepRegion]] = []
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
