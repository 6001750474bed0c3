"""Copies between host memory and a device that run beside the device's computation."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

Event = Any
"""Stands for all work that a stream was given before."""


class Copies:
    """Copies to and from a device, done when they are given: to one without streams, and on the CPU itself.

    ``SideStream`` gives them to a stream beside the one that computes. There only ``wait`` makes the host wait, and
    ``computed``, ``compute_after`` and ``device_bytes`` may be called in any thread: they mean the stream that was
    current in the thread that called ``follow`` last.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def follow(self) -> None:
        """Take the stream that is current in this thread for the one that computes."""

    def computed(self) -> Event:
        """Return an event after all that the device was given to compute by now."""
        return None

    def after(self, event: Event) -> None:
        """Let copies that are given from now on run after ``event``."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between tensors of one shape and dtype, which must be kept until it is done."""
        target.copy_(source)

    def copied(self) -> Event:
        """Return an event after all copies that were given by now."""
        return None

    def compute_after(self, event: Event) -> None:
        """Let what is given to compute from now on run after ``event``."""

    def is_done(self, event: Event) -> bool:
        return True

    def wait(self, event: Event) -> None:
        """Make the host wait for ``event``."""

    def reads(self, host: torch.Tensor) -> bool:
        """Return whether copies from ``host`` run without the processor (it is pinned)."""
        return True

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        """Uninitialised host memory that ``reads`` is true of, uint8 [nbytes]."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        """Uninitialised memory of the device, free once what computes by now is done, uint8 [nbytes]."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def copies_of(device: torch.device) -> Copies:
    """Return copies to and from ``device``: on a side stream where it has streams, else at once."""
    if device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream"):
        return SideStream(device)
    return Copies(device)


class SideStream(Copies):
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)
        self._computing = self._module.current_stream(device)

    def follow(self) -> None:
        self._computing = self._module.current_stream(self._device)

    def computed(self) -> Event:
        event = self._module.Event()
        event.record(self._computing)
        return event

    def after(self, event: Event) -> None:
        self._stream.wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def copied(self) -> Event:
        event = self._module.Event()
        event.record(self._stream)
        return event

    def compute_after(self, event: Event) -> None:
        self._computing.wait_event(event)

    def is_done(self, event: Event) -> bool:
        return bool(event.query())

    def wait(self, event: Event) -> None:
        event.synchronize()

    def reads(self, host: torch.Tensor) -> bool:
        return host.is_pinned()

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        # The allocator reuses a stream's memory in the order of that stream.
        with self._module.stream(self._computing):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


class HostPool:
    """Host buffers by size, used again by copies of one stream, whose order keeps these apart."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._spare: dict[int, list[torch.Tensor]] = defaultdict(list)

    def take(self, nbytes: int) -> torch.Tensor:
        spare = self._spare[nbytes]
        return spare.pop() if spare else self._copies.host_bytes(nbytes)

    def give_back(self, buffer: torch.Tensor) -> None:
        self._spare[buffer.numel()].append(buffer)


# -- layout ----------------------------------------------------------------------------------------------


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a copy of ``tensor``, of any shape: in its own order of dimensions, without gaps."""
    return torch.empty_like(tensor, device="meta").stride()


def view_of(
    buffer: torch.Tensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int = 0
) -> torch.Tensor:
    """Return a tensor of ``size`` in the memory of ``buffer``, uint8 [n], ``offset`` bytes after its
    first.
    """
    # set_ counts in elements, from the beginning of the storage.
    first = (buffer.storage_offset() + offset) // dtype.itemsize
    view = torch.empty(0, dtype=dtype, device=buffer.device)
    return view.set_(buffer.untyped_storage(), first, tuple(size), tuple(stride))


STAGING_BYTES = 32 * 2**20


class Staging:
    """Copies tensors to a device: those that are not pinned piece by piece through two buffers in turn.

    While one buffer is on its way to the device, the other is filled: from memory, or, where the tensor is
    mapped from a file, from disk.
    """

    def __init__(self, copies: Copies, nbytes: int = STAGING_BYTES) -> None:
        self._copies = copies
        self._nbytes = nbytes
        self._lock = threading.Lock()
        # Each with the event after which it may be filled again.
        self._buffers: list[tuple[torch.Tensor, Event]] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Give the copy to the device, of tensors of one shape; ``source`` may be changed once it is done."""
        if self._copies.reads(source):
            self._copies.copy(target, source)
            return
        # Bytes are copied in the order in which they lie, so both must lie alike.
        if source.stride() != target.stride():
            source = torch.empty_strided(target.shape, target.stride(), dtype=source.dtype).copy_(source)
        if not source.numel():
            return
        with self._lock:
            self._copy_bytes(_bytes(target), _bytes(source))

    def _copy_bytes(self, target: torch.Tensor, source: torch.Tensor) -> None:
        for start in range(0, source.numel(), self._nbytes):
            piece = source[start : start + self._nbytes]
            buffer = self._next_buffer()
            buffer[: piece.numel()].copy_(piece)
            self._copies.copy(target[start : start + piece.numel()], buffer[: piece.numel()])
            self._buffers.append((buffer, self._copies.copied()))

    def _next_buffer(self) -> torch.Tensor:
        if len(self._buffers) < 2:
            return self._copies.host_bytes(self._nbytes)
        buffer, copied = self._buffers.pop(0)
        self._copies.wait(copied)
        return buffer


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor without gaps, in the order in which it lies."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
