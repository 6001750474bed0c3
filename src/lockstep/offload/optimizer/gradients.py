"""Gradients in a file: a thread writes each one there as it appears; the step reads them from there.

Reference: Rajbhandari et al., ZeRO-Infinity, SC 2021.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.comm.dtensor import is_dtensor, local
from lockstep.offload.files.direct import FreedMemory, aligned, aligned_buffer, region_of
from lockstep.offload.optimizer.clipping import KnownNorm, OffloadedGradients
from lockstep.offload.optimizer.states import like_parameter
from lockstep.offload.optimizer.unscaled import ensure_scaled
from lockstep.torch_internals import autograd as torch_autograd
from lockstep.torch_internals import tensors as torch_tensors

_UNDER_WAY = 2
"""So many gradients wait in memory to be written; the next one waits for the first of them."""


@dataclass(frozen=True)
class _Write:
    """A gradient that a thread writes to its place in the file. Until then it is an ordinary tensor in memory."""

    parameter: weakref.ref[torch.Tensor]
    gradient: torch.Tensor
    version: int
    offset: int
    norm: Future[KnownNorm | None]


class GradientFile:
    """Keeps the gradients of parameters in host memory or in shards of it (DTensor) in a file.

    After backward ``parameter.grad`` is mapped from the file, with the value and dtype that it would have had. During
    backward a thread writes what has appeared, and takes its norm if gradients were clipped before; host memory holds
    a few gradients at a time besides what autograd itself does. A gradient that came before in the same accumulation
    window is read and added to. Everything else may be done to gradients as ever.

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
        self.file = OffloadedGradients(
            folder, sum(aligned(local(p.detach()).nbytes) for p in unique.values())
        )
        self.notes = self.file.notes
        self._largest = max((aligned(local(p.detach()).nbytes) for p in unique.values()), default=0)
        self._buffer = aligned_buffer(self._largest)
        self._earlier_buffer = torch.empty(0, dtype=torch.uint8)
        self._freed = FreedMemory()
        self._earlier: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._thread = ThreadPoolExecutor(1, "lockstep-gradients")
        self._writes: deque[_Write] = deque()
        self._backward = torch_autograd.NO_BACKWARD
        self._handles: list[RemovableHandle] = []
        for parameter in unique.values():
            self._watch(parameter, self.file.place(aligned(local(parameter.detach()).nbytes)))

    def close(self) -> None:
        """Leave gradients that appear from now on in memory."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._finish_writes()
        self._thread.shutdown()

    def _watch(self, parameter: torch.Tensor, offset: int) -> None:
        # A hook that held its parameter would keep it for ever.
        reference = weakref.ref(parameter)

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
            elif here is not None and here.grad is not None:
                ensure_scaled(local(here.grad))

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
        """Put back what nothing was added to: ``torch.autograd.grad`` calls the hooks, but leaves gradients alone."""
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
            # Added to in place, through the mapping.
            return
        if earlier is not None:
            here.add_(self._in_memory(earlier, offset))
        # One fewer, as another one comes below.
        self._finish_writes(_UNDER_WAY - 1)
        self._writes.append(self._begin_to_write(parameter, gradient, here, offset))
        if torch_tensors.has_hook(parameter, torch_tensors.POST_ACCUMULATE):
            # The hook may change it.
            self._finish_writes()
        else:
            self._finish_writes_after_backward()

    def _in_memory(self, earlier: torch.Tensor, offset: int) -> torch.Tensor:
        """Return what came before for the same parameter; it is good until the next call."""
        if region_of(earlier) != (self.file, offset):
            return earlier
        if not self._earlier_buffer.numel():
            self._earlier_buffer = aligned_buffer(self._largest)
        buffer = self._earlier_buffer[: aligned(earlier.nbytes)]
        self.file.read(offset, buffer)
        return buffer[: earlier.nbytes].view(earlier.dtype).view(earlier.shape)

    def _begin_to_write(
        self, parameter: torch.Tensor, gradient: torch.Tensor, here: torch.Tensor, offset: int
    ) -> _Write:
        self.notes.forget(offset)
        norm = self._thread.submit(self._write, here, offset, self.notes.norm_type, torch.get_num_threads())
        return _Write(weakref.ref(parameter), gradient, torch_tensors.version(here), offset, norm)

    @torch.no_grad()
    def _write(
        self, here: torch.Tensor, offset: int, norm_type: float | None, threads: int
    ) -> KnownNorm | None:
        """Write in the thread. Returns the norm, if it is asked for."""
        # How a norm is summed up depends on it.
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        buffer = self._buffer[: aligned(here.nbytes)]
        copy = buffer[: here.nbytes].view(here.dtype).view(here.shape)
        copy.copy_(here)
        norm = None if norm_type is None else KnownNorm(norm_type, torch.linalg.vector_norm(copy, norm_type))
        self.file.write(offset, buffer)
        self._freed.add(buffer.numel())
        return norm

    def _finish_writes_after_backward(self) -> None:
        if not torch_autograd.is_in_backward():
            self._finish_writes()
        elif self._backward != (backward := torch_autograd.current_backward()):
            self._backward = backward
            torch_autograd.at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        # Other callbacks at the end may bring more gradients.
        self._backward = torch_autograd.NO_BACKWARD
        self._finish_writes()

    @torch.no_grad()
    def _finish_writes(self, left: int = 0) -> None:
        """Wait until at most so many gradients are in memory; map the others from the file, where they are written."""
        while len(self._writes) > left:
            write = self._writes.popleft()
            try:
                norm = write.norm.result()
            except BaseException:
                # These stay in memory: one error is enough.
                self._writes.clear()
                raise
            parameter, here = write.parameter(), local(write.gradient)
            if parameter is None or parameter.grad is not write.gradient:
                continue
            # It was changed while it was in memory.
            if torch_tensors.version(here) != write.version:
                again = self._begin_to_write(parameter, write.gradient, here, write.offset)
                norm = again.norm.result()
            mapped = self.file.tensor(write.offset, here.shape, here.dtype)
            parameter.grad = like_parameter(mapped, parameter)
            if norm is not None:
                self.notes.keep(write.offset, mapped, norm)

    def _belongs_here(self, here: torch.Tensor, gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
        plain = here.layout == torch.strided and here.device.type == "cpu" and here.is_contiguous()
        shard = local(parameter.detach())
        alike = (here.shape, here.dtype) == (shard.shape, shard.dtype)
        return plain and alike and not gradient.requires_grad
