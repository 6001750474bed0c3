"""Gradients in a file: each is written there as it appears, maybe clipped there, and read from there by the step.

Reference: Rajbhandari et al., ZeRO-Infinity, SC 2021.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.comm.dtensor import is_dtensor, local
from lockstep.offload.files.direct import FreedMemory, OffloadFile, aligned, aligned_buffer, region_of
from lockstep.offload.optimizer.states import StepRegion, like_parameter, read_all, region_to_move, write_all
from lockstep.torch_internals import autograd as torch_autograd


class GradientFile:
    """Keeps the gradients of parameters in host memory or in shards of it (DTensor) in a file.

    After backward ``parameter.grad`` is mapped from the file, with the value and dtype that it would have had; host
    memory holds one gradient at a time besides what autograd itself does. A gradient that came before in the same
    accumulation window is read, added to and written back. Everything else may be done to gradients as ever.

    Gradients with a graph of their own (``create_graph=True``), sparse ones, and those of another dtype than their
    parameter stay in memory.

    Args:
        parameters: Those that require no gradient are left out.
        folder: Where.

    Raises:
        OffloadError: The folder cannot be written to, or has too little space for one gradient of each.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], folder: Path) -> None:
        unique = {id(p): p for p in parameters if p.requires_grad and local(p.detach()).numel()}
        self.file = OffloadFile(folder, sum(aligned(local(p.detach()).nbytes) for p in unique.values()))
        largest = max((aligned(local(p.detach()).nbytes) for p in unique.values()), default=0)
        self._buffer = aligned_buffer(largest)
        self._freed = FreedMemory()
        self._earlier: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._handles: list[RemovableHandle] = []
        for parameter in unique.values():
            self._watch(parameter, self.file.place(aligned(local(parameter.detach()).nbytes)))

    def close(self) -> None:
        """Leave gradients that appear from now on in memory."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch(self, parameter: torch.Tensor, offset: int) -> None:
        reference = weakref.ref(parameter)  # a hook that held its parameter would keep it for ever

        def appears(gradient: torch.Tensor) -> None:
            here = reference()
            # What autograd would add to is put aside, so that it need not be brought back to memory for that.
            if (
                here is not None
                and here.grad is not None
                and not gradient.requires_grad
                and not gradient.is_sparse
            ):
                self._put_aside(here)

        def accumulated(here: torch.Tensor) -> None:
            self._accumulated(here, offset, self._earlier.pop(here, None))

        # FSDP2 does not call the hooks of its shards before it adds to their gradients.
        if not is_dtensor(parameter):
            self._handles.append(parameter.register_hook(appears))
        self._handles.append(parameter.register_post_accumulate_grad_hook(accumulated))

    def _put_aside(self, parameter: torch.Tensor) -> None:
        if not len(self._earlier):
            torch_autograd.at_end_of_backward(self._put_back)
        self._earlier[parameter] = parameter.grad
        parameter.grad = None

    def _put_back(self) -> None:
        """What nothing was added to: ``torch.autograd.grad`` calls the hooks, but leaves gradients alone."""
        while len(self._earlier):
            parameter, earlier = self._earlier.popitem()
            if parameter.grad is None:
                parameter.grad = earlier

    @torch.no_grad()
    def _accumulated(self, parameter: torch.Tensor, offset: int, earlier: torch.Tensor | None) -> None:
        gradient = parameter.grad
        if gradient is None:
            parameter.grad = earlier
            return
        here = local(gradient)
        if not self._belongs_here(here, gradient, parameter):
            if earlier is not None:
                parameter.grad = earlier + gradient
            return
        if region_of(here) == (self.file, offset):
            return  # added to in place, through the mapping
        buffer = self._buffer[: aligned(here.nbytes)]
        held = buffer[: here.numel() * here.element_size()].view(here.dtype).view(here.shape)
        if earlier is None:
            held.copy_(here)
        else:
            if region_of(earlier) == (self.file, offset):
                self.file.read(offset, buffer)
            else:
                held.copy_(earlier)
            held.add_(here)
        self.file.write(offset, buffer)
        mapped = self.file.tensor(offset, here.shape, here.dtype)
        parameter.grad = like_parameter(mapped, parameter)
        self._freed.add(buffer.numel())

    def _belongs_here(self, here: torch.Tensor, gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
        plain = here.layout == torch.strided and here.device.type == "cpu" and here.is_contiguous()
        shard = local(parameter.detach())
        alike = (here.shape, here.dtype) == (shard.shape, shard.dtype)
        return plain and alike and not gradient.requires_grad


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
