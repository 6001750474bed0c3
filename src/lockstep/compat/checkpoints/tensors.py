"""The bytes of source files as tensors, mapped, not copied; and memory for tensors that are put together."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import CheckpointError

_SMALL_BYTES = 2**20
_CHUNK = 2**24
_MAX_DIMS = 64
_BY_NAME = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _BY_NAME if hasattr(torch, name)}


@dataclass(frozen=True, eq=False)
class StoredObject:
    """An object of a class that was not loaded: its full name and the state it was pickled with."""

    name: str
    state: Any

    def get(self, key: str) -> Any:
        """Return an entry of its state; None if there is none."""
        return self.state.get(key) if isinstance(self.state, dict) else None


class UnreadableError(Exception):
    """A file holds something that is not read; the text says what."""


class MalformedError(UnreadableError):
    """A file is not whole, or contradicts itself."""


class Scratch:
    """Memory for tensors that are put together: large ones lie in a file that is gone with them."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised. Raises CheckpointError if there is no space."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _SMALL_BYTES:
            return torch.empty(shape, dtype=dtype)
        try:
            with tempfile.TemporaryFile() as file:
                # A full disk is to be found here, not while copying.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                else:
                    file.truncate(nbytes)
                place = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            raise CheckpointError(
                f"There is no space for {nbytes} bytes in {tempfile.gettempdir()}: {error.strerror}. Set TMPDIR to a "
                "folder with room for the whole checkpoint."
            ) from error
        return torch.frombuffer(place, dtype=dtype).view(shape)


class MappedFile:
    """The bytes of a source file. Its tensors share memory with the file until they are written to.

    A file that is changed while it is mapped changes its tensors; one that is cut ends the process.
    """

    def __init__(self, descriptor: int, label: str, scratch: Scratch) -> None:
        self.label = label
        self.scratch = scratch
        self.size = os.fstat(descriptor).st_size
        # What is written to a tensor stays in memory, and does not reach the file.
        self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY) if self.size else None
        self._checked: set[tuple[int, int]] = set()
        self._storages: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def storage(self, start: int, nbytes: int, crc32: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the bytes from ``start`` as one row of ``dtype``; always the same object for the same place.

        Raises:
            CheckpointError: they are not those that the file's checksum was made of.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        if self._map is None or not 0 <= start <= self.size - nbytes:
            raise MalformedError(f"{nbytes} bytes at {start} of {self.size}")
        key = (start, nbytes, dtype)
        if key not in self._storages:
            self._check(start, nbytes, crc32)
            self._storages[key] = self._row(start, nbytes, dtype)
        return self._storages[key]

    def _row(self, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        assert self._map is not None
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=start)
        if dtype is torch.bool:
            # Any other byte than 0 and 1 would be undefined.
            return raw != 0
        if start % dtype.itemsize == 0:
            return raw.view(dtype)
        # Files of torch before 1.6 align nothing.
        row = self.scratch.empty((nbytes // dtype.itemsize,), dtype)
        row.view(torch.uint8).copy_(raw)
        return row

    def _check(self, start: int, nbytes: int, crc32: int | None) -> None:
        if crc32 is None or (start, nbytes) in self._checked:
            return
        assert self._map is not None
        found = 0
        with memoryview(self._map) as view:
            for at in range(start, start + nbytes, _CHUNK):
                found = zlib.crc32(view[at : min(at + _CHUNK, start + nbytes)], found)
        if found != crc32:
            raise CheckpointError(
                f"{self.label} is damaged: {nbytes} bytes at {start} have the checksum {found:08x}, not {crc32:08x}. "
                "Copy it again (or, if set_crc32_options turned checksums off, save it again with them)."
            )
        self._checked.add((start, nbytes))


@dataclass(frozen=True, eq=False)
class Storage:
    """The ``nbytes`` of a file from ``start``; ``crc32`` is their checksum, if there is one."""

    file: MappedFile
    dtype: torch.dtype
    start: int
    nbytes: int
    crc32: int | None

    def tensor(self, dtype: torch.dtype, offset: int, shape: object, stride: object) -> torch.Tensor:
        """Return a view of it. Raises MalformedError if it reaches beyond."""
        # A storage may end within an element of this dtype: the checksum is then of more bytes than are read.
        rest = self.nbytes % dtype.itemsize
        row = self.file.storage(self.start, self.nbytes - rest, None if rest else self.crc32, dtype)
        (offset,), sizes, steps = counts((offset,)), counts(shape), counts(stride)
        count = math.prod(sizes)
        # Index of the last element: offset + sum of (length - 1) * stride.
        last = offset + sum((length - 1) * step for length, step in zip(sizes, steps, strict=True))
        if count > len(row) or (count and last >= len(row)):
            raise MalformedError(f"a tensor of shape {sizes} in {len(row)} elements")
        return row.as_strided(sizes, steps, offset) if count else torch.empty(sizes, dtype=dtype)


def counts(values: Any) -> tuple[int, ...]:
    """Return ``values``, which must be a tuple of integers that are not negative."""
    is_counts = isinstance(values, tuple) and len(values) <= _MAX_DIMS
    if not is_counts or any(type(value) is not int or value < 0 for value in values):
        raise MalformedError(f"the sizes {str(values)[:80]}")
    return tuple(values)
