"""Clipping of gradients that lie in files: norms that were taken before they were written, and scaling.

Reference: Rajbhandari et al., ZeRO-Infinity, SC 2021.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lockstep.comm.dtensor import local
from lockstep.offload.files.direct import OffloadFile, aligned, aligned_buffer, region_of
from lockstep.offload.files.pages import is_untouched
from lockstep.offload.optimizer.states import StepRegion, read_all, region_to_move, write_all
from lockstep.torch_internals import tensors as torch_tensors


@dataclass(frozen=True)
class KnownNorm:
    """The ``norm`` (0-d) of a gradient."""

    norm_type: float
    norm: torch.Tensor


class GradientNorms:
    """Norms of gradients in a file, by their place in it. ``norm_type``: which are asked for; None: none yet."""

    def __init__(self) -> None:
        self.norm_type: float | None = None
        self._known: dict[int, tuple[int, KnownNorm]] = {}  # and the version of the gradient

    def keep(self, offset: int, gradient: torch.Tensor, norm: KnownNorm) -> None:
        """The gradient (mapped, of any shape) was written at ``offset``, and nobody has seen it yet."""
        self._known[offset] = torch_tensors.version(gradient), norm

    def forget(self, offset: int) -> None:
        """Something else is about to be written there."""
        self._known.pop(offset, None)

    def find(
        self, file: OffloadFile, offset: int, gradient: torch.Tensor, norm_type: float
    ) -> torch.Tensor | None:
        """The norm of a gradient (mapped, of any shape) if it is known and the gradient is what was written."""
        self.norm_type = norm_type
        version, known = self._known.get(offset, (0, None))
        if known is None or known.norm_type != norm_type or version != torch_tensors.version(gradient):
            return None
        # Writes through ``gradient.data`` have no version, but they bring pages to memory.
        return known.norm if file.is_direct and is_untouched(gradient) else None


_NORMS: WeakKeyDictionary[OffloadFile, GradientNorms] = WeakKeyDictionary()


def norms_of(file: OffloadFile) -> GradientNorms:
    """Those of the gradients in ``file``."""
    return _NORMS.setdefault(file, GradientNorms())


@torch.no_grad()
def norm_of(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """``torch.nn.utils.get_total_norm`` of plain tensors, to the last bit; those in files are let go one by one.

    What was taken when a gradient was written is not taken again.
    """
    regions = [region_of(gradient) for gradient in gradients]
    if not any(regions):
        return get_total_norm(gradients, norm_type)
    norms = []
    for gradient, region in zip(gradients, regions, strict=True):
        if region is None:
            norms.append(torch.linalg.vector_norm(gradient, norm_type))
            continue
        file, offset = region
        norm = norms_of(file).find(file, offset, gradient, norm_type)
        if norm is None:
            norm = torch.linalg.vector_norm(gradient, norm_type)
            file.drop(offset, aligned(gradient.nbytes))
        norms.append(norm)
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
        norms_of(region.file).forget(region.offset)
        write_all([region], buffer)
        torch.autograd.graph.increment_version(gradient)


def _scale(gradients: list[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    holders: Any = [SimpleNamespace(grad=gradient) for gradient in gradients]
    clip_grads_with_norm_(holders, max_norm, norm)
