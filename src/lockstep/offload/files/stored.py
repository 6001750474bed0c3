"""Tensors in files: mapped, or read one at a time."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from lockstep.errors import CheckpointError
from lockstep.offload.files.pages import FileMapping, Pages, file_mappings, map_file

# Bytes of a file that are in memory while it is copied.
PIECE_BYTES = 8 * 2**20


class Stored(Protocol):
    """A tensor of a checkpoint."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> torch.Size: ...

    @property
    def source(self) -> str:
        """Where it comes from and as of when; another text once that has changed."""

    def mapped(self, files: MappedFiles) -> torch.Tensor | None:
        """Return the tensor as a mapping of its file, with a storage of its own; None where that cannot
        be.
        """

    def pieces(self, files: MappedFiles) -> Iterator[torch.Tensor]:
        """Return its elements in order, in pieces, each of which is only there until the next one is asked for."""


def read(
    stored: Stored, files: MappedFiles, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return a tensor of a checkpoint in a device's memory, converted."""
    tensor = torch.empty(stored.shape, dtype=dtype, device=device)
    flat, done = tensor.view(-1), 0
    for piece in stored.pieces(files):
        flat[done : done + piece.numel()].copy_(piece)
        done += piece.numel()
    return tensor


def pieces_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor of any shape, as vectors of at most ``PIECE_BYTES`` each."""
    yield from tensor.detach().contiguous().view(-1).split(PIECE_BYTES // tensor.element_size())


def pieces_on_cpu(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the same on the CPU, piece by piece."""
    return (piece.cpu() for piece in pieces_of(tensor))


def converted(pieces: Iterator[torch.Tensor], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield the same pieces, (n,) each, in another dtype."""
    buffer: torch.Tensor | None = None
    for piece in pieces:
        if piece.dtype == dtype or not piece.numel():
            yield piece.to(dtype)
            continue
        if buffer is None:
            # Not from the allocator: the holes that it would leave are too small for the next, and memory grows.
            buffer = torch.frombuffer(mmap.mmap(-1, piece.numel() * dtype.itemsize), dtype=dtype)
        yield buffer[: piece.numel()].copy_(piece)


class MappedFiles:
    """Mappings of files, each made once."""

    def __init__(self) -> None:
        self._files: dict[str, torch.Tensor] = {}
        self._mappings: list[FileMapping] | None = None

    def tensor(self, path: str, offset: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """Return a part of the file; nothing is read."""
        if not prod(shape):
            return torch.empty(shape, dtype=dtype)
        if path not in self._files:
            self._files[path] = map_file(path)
            self._mappings = None
        # Not a slice: with a storage of its own it can be saved and moved alone.
        whole = self._files[path].numpy()
        return torch.frombuffer(whole, dtype=dtype, count=prod(shape), offset=offset).view(shape)

    def pages(self, tensor: torch.Tensor) -> Pages:
        """Return the pages of a tensor that is mapped, by this or in another way before."""
        if self._mappings is None:
            self._mappings = file_mappings()
        return Pages([tensor], self._mappings)

    def pieces(self, mapped: torch.Tensor) -> Iterator[torch.Tensor]:
        """Pieces of a contiguous mapped tensor: each is read in as a whole, and its memory let go after."""
        for piece in pieces_of(mapped):
            pages = self.pages(piece)
            pages.populate()
            yield piece
            pages.drop()


@dataclass(frozen=True)
class FileRegion:
    """A tensor's bytes in a file."""

    path: str
    offset: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def source(self) -> str:
        return f"{file_state(self.path)} {self.offset}"

    def mapped(self, files: MappedFiles) -> torch.Tensor | None:
        if self.offset % self.dtype.itemsize:
            return None
        return files.tensor(self.path, self.offset, self.dtype, self.shape)

    def pieces(self, files: MappedFiles) -> Iterator[torch.Tensor]:
        mapped = self.mapped(files)
        if mapped is not None:
            yield from files.pieces(mapped)
            return
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = bytearray(file.read(self.nbytes))
        if len(data) < self.nbytes:
            raise CheckpointError(
                f"{self.path} has become shorter since it was opened. Copy or download it again."
            )
        yield torch.frombuffer(data, dtype=self.dtype)


@dataclass(frozen=True)
class PickledTensor:
    """A tensor of a file of ``torch.save``, which torch has mapped or read."""

    path: str
    tensor: torch.Tensor
    is_mapped: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def source(self) -> str:
        first = self.tensor.data_ptr() - self.tensor.untyped_storage().data_ptr()
        return f"{file_state(self.path)} {first}"

    def mapped(self, files: MappedFiles) -> torch.Tensor | None:
        return None

    def pieces(self, files: MappedFiles) -> Iterator[torch.Tensor]:
        is_plain = self.is_mapped and self.tensor.is_contiguous()
        yield from (files.pieces if is_plain else pieces_of)(self.tensor)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, uint8 [nbytes], as a view."""
    return tensor.detach().view(-1).view(torch.uint8)


def file_state(path: str) -> str:
    """Return a text that changes when the file does."""
    found = os.stat(path)
    return f"{os.path.realpath(path)} {found.st_size} {found.st_mtime_ns}"
