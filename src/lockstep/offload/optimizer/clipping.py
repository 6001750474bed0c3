"""Clipping of gradients that lie in files: norms that were taken before they were written, and scaling by the step.

Reference: Rajbhandari et al., ZeRO-Infinity, SC 2021.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils import get_total_norm
from torch.utils.weak import TensorWeakRef

from lockstep.comm.dtensor import is_dtensor, local
from lockstep.offload.files.direct import OffloadFile, aligned, region_of
from lockstep.offload.files.pages import is_untouched
from lockstep.offload.optimizer import unscaled
from lockstep.offload.optimizer.kernel import GradientScale
from lockstep.offload.optimizer.states import StepRegion, region_to_move
from lockstep.torch_internals import tensors as torch_tensors


@dataclass(frozen=True)
class KnownNorm:
    """The ``norm`` (0-d) of a gradient."""

    norm_type: float
    norm: torch.Tensor


class GradientNotes:
    """Of gradients in a file, by their place in it: norms that are known, and which are still to be scaled.

    ``norm_type``: which norms are asked for; None: none yet.
    """

    def __init__(self) -> None:
        self.norm_type: float | None = None
        # Each with the version of the gradient.
        self._known: dict[int, tuple[int, KnownNorm]] = {}
        self._unscaled: dict[int, TensorWeakRef] = {}

    def keep(self, offset: int, gradient: torch.Tensor, norm: KnownNorm) -> None:
        """Note a gradient (mapped, of any shape) that was written at ``offset``, and that nobody has seen yet."""
        self._known[offset] = torch_tensors.version(gradient), norm

    def forget(self, offset: int) -> None:
        """Forget a norm, because another gradient is about to be written there."""
        self._known.pop(offset, None)
        reference = self._unscaled.pop(offset, None)
        if reference is not None and (gradient := reference()) is not None:
            unscaled.forget(gradient)

    def scale_later(self, offset: int, gradient: torch.Tensor, scale: GradientScale) -> None:
        """Leave the scaling of a gradient, plain and mapped, to the step."""
        self._known.pop(offset, None)
        self._unscaled[offset] = TensorWeakRef(gradient)
        unscaled.scale_later(gradient, scale)

    def find(self, offset: int, gradient: torch.Tensor, norm_type: float) -> torch.Tensor | None:
        """Return the norm of a gradient (mapped, of any shape) if it is known and of this version of the
        gradient.
        """
        self.norm_type = norm_type
        version, known = self._known.get(offset, (0, None))
        if known is None or known.norm_type != norm_type or version != torch_tensors.version(gradient):
            return None
        return known.norm


class OffloadedGradients(OffloadFile):
    """A file of gradients, with ``notes`` on them."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        super().__init__(folder, nbytes)
        self.notes = GradientNotes()

    def norm(self, offset: int, gradient: torch.Tensor, norm_type: float) -> torch.Tensor | None:
        """Return the norm of a gradient (mapped, of any shape) if it is known and the gradient is what was
        written.
        """
        norm = self.notes.find(offset, gradient, norm_type)
        # Writes through ``gradient.data`` have no version, but they bring pages to memory.
        return norm if norm is not None and self.is_direct and is_untouched(gradient) else None


@torch.no_grad()
def norm_of(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Compute ``torch.nn.utils.get_total_norm`` of plain tensors, to the last bit; those in files are let go one by
    one.

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
        norm = file.norm(offset, gradient, norm_type) if isinstance(file, OffloadedGradients) else None
        if norm is None:
            norm = torch.linalg.vector_norm(gradient, norm_type)
            file.drop(offset, aligned(gradient.nbytes))
        norms.append(norm)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


@torch.no_grad()
def scale_offloaded(gradients: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scale gradients, this rank's shards of them, by ``norm`` (0-d) as ``torch.nn.utils.clip_grads_with_norm_`` does.

    Those in files are scaled by the step that reads them. Shards (DTensor) in files are read and written back one by
    one, past the page cache. None is touched if they need no scaling.
    """
    scale = GradientScale(max_norm, norm.clone())
    in_memory: list[torch.Tensor] = []
    moved: list[tuple[torch.Tensor, StepRegion]] = []
    for gradient in gradients:
        part = local(gradient)
        region = region_to_move(part, changes=True)
        if region is None:
            in_memory.append(part)
        else:
            moved.append((gradient, region))
    scale.apply(in_memory)
    if not moved or scale.changes_nothing():
        return
    for gradient, region in moved:
        # The step scales it, but whoever has noted its version must see a change now.
        torch.autograd.graph.increment_version(local(gradient))
        notes = region.file.notes if isinstance(region.file, OffloadedGradients) else GradientNotes()
        if is_dtensor(gradient):
            unscaled.scale_in_file(region, scale)
            notes.forget(region.offset)
        else:
            notes.scale_later(region.offset, gradient, scale)
