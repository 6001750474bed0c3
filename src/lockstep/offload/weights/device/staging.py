"""Host memory that a device cannot read by itself, copied to it through two pinned buffers."""

from __future__ import annotations

import threading

import torch

from lockstep.offload.copies import Copies, Event

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
        self._buffers: list[tuple[torch.Tensor, Event]] = []  # and when each may be filled again

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Give the copy to the device; ``source`` may be changed once it is done."""
        if self._copies.reads(source):
            self._copies.copy(target, source)
            return
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
    """The memory of a tensor without gaps, in the order in which it lies."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
