"""Where weights are at rest while a model trains: in a file, as memory-mapped tensors."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike

import torch

from lockstep.offload.files.direct import OffloadFile, aligned, aligned_buffer
from lockstep.offload.files.heap import FreedMemory

STAGING_BYTES = 16 * 2**20


class OffloadedParameters:
    """Tensors of one model in a file of their own, which is gone when the process is.

    Args:
        sizes: Bytes of each tensor that there will be room for.
        folder: Where the file is made; on a file system with enough room for all of it.

    Raises:
        OffloadError: there is not enough room, or the folder cannot be written to.
    """

    def __init__(self, sizes: Iterable[int], folder: str | PathLike[str]) -> None:
        self._file = OffloadFile(folder, sum(map(aligned, sizes)))
        self._staging: torch.Tensor | None = None
        self._freed = FreedMemory()

    @property
    def file(self) -> OffloadFile:
        return self._file

    @torch.no_grad()
    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values as a tensor that is mapped from the file; it is written past the page cache."""
        if not tensor.numel():
            return tensor
        offset = self._file.place(aligned(tensor.nbytes))
        self._write(offset, tensor)
        self._freed.add(tensor.nbytes)  # what the caller has no more use for
        return self._file.tensor(offset, tensor.shape, tensor.dtype)

    def close(self) -> None:
        """Let the staging buffer go; mapped tensors stay what they are."""
        self._staging = None

    def _write(self, offset: int, tensor: torch.Tensor) -> None:
        if self._staging is None:
            self._staging = aligned_buffer(STAGING_BYTES)
        numbers = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for start in range(0, numbers.numel(), STAGING_BYTES):
            piece = numbers[start : start + STAGING_BYTES]
            buffer = self._staging[: aligned(piece.numel())]
            buffer[: piece.numel()].copy_(piece)
            buffer[piece.numel() :].zero_()
            self._file.write(offset + start, buffer)
