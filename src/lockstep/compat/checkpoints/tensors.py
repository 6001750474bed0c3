"""From the restricted process's JSON to values: tensors are the bytes of the source files, mapped, not copied."""

from __future__ import annotations

import base64
import math
import mmap
import os
import tempfile
import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.config.files import JsonObject
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
_ARRAYS = ("b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
_SEQUENCES: dict[str, Callable[[list[object]], object]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """An object of a class that was not loaded: its full name and the state it was pickled with."""

    name: str
    state: Any

    def get(self, key: str) -> Any:
        """An entry of its state; None if there is none."""
        return self.state.get(key) if isinstance(self.state, dict) else None


class MalformedError(Exception):
    """An answer of the restricted process that it cannot have meant."""


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
        """The bytes from ``start`` as one row of ``dtype``; always the same object for the same place.

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


def decode(value: object, file: MappedFile) -> Any:
    """The value that a line of the restricted process's JSON stands for; its tensors are in ``file``.

    Raises:
        MalformedError: the JSON is not of the form that the process writes.
        CheckpointError: the file is damaged.
    """
    try:
        return _decode(value, file)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise MalformedError(f"{type(error).__name__}: {error}") from None


def _decode(value: object, file: MappedFile) -> object:
    if isinstance(value, list):
        return [_decode(item, file) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value["$"]
    if kind in ("dict", "counter"):
        decoded = {_key(_decode(key, file)): _decode(item, file) for key, item in value["items"]}
        return Counter(decoded) if kind == "counter" else decoded
    if kind == "tensor":
        return _tensor(value, file)
    if kind == "int":
        return int(value["value"], 16)
    if kind == "float":
        return float(value["value"])
    if kind == "bytes":
        return base64.b64decode(value["value"], validate=True)
    if kind == "dtype":
        return _dtype(value["value"])
    if kind == "array":
        return _array(value)
    if kind == "record":
        return StoredTensor(str(value["name"]), _decode(value["state"], file))
    return _SEQUENCES[kind]([_decode(item, file) for item in value["items"]])


def _key(key: object) -> object:
    """Keys that are cheap to hash, whoever chose them."""
    parts = key if isinstance(key, tuple) else (key,)
    for part in parts:
        if not (
            part is None
            or isinstance(part, (str, bool, StoredTensor))
            or (type(part) is int and abs(part) < 2**53)
        ):
            raise MalformedError(f"a key of type {type(part).__name__}")
    return key


def _dtype(name: object) -> torch.dtype:
    if name not in DTYPES:
        raise MalformedError(f"the dtype {name!r}, which torch {torch.__version__} does not have")
    return DTYPES[name]


def _counts(values: object) -> list[int]:
    if (
        not isinstance(values, list)
        or len(values) > _MAX_DIMS
        or any(type(v) is not int or v < 0 for v in values)
    ):
        raise MalformedError(f"the sizes {values!r}")
    return values


def _tensor(value: JsonObject, file: MappedFile) -> torch.Tensor:
    dtype, shape, stride = _dtype(value["dtype"]), _counts(value["shape"]), _counts(value["stride"])
    start, nbytes, crc32 = value["storage"]
    (offset,) = _counts([value["offset"]])
    _counts([start, nbytes])
    # A storage may end within an element of this dtype: the checksum is then of more bytes than are read.
    rest = nbytes % dtype.itemsize
    row = file.storage(start, nbytes - rest, None if rest else crc32, dtype)
    count = math.prod(shape)
    # Index of the last element: offset + sum of (length - 1) * stride.
    last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    if count > len(row) or (count and last >= len(row)):
        raise MalformedError(f"a tensor of shape {shape} in {len(row)} elements")
    found = row.as_strided(shape, stride, offset) if count else torch.empty(shape, dtype=dtype)
    for word in value["lazy"]:
        found = {"conj": found.conj().resolve_conj, "neg": found.neg}[word]()
    return found


def _array(value: JsonObject) -> npt.NDArray[np.generic]:
    if value["dtype"] not in _ARRAYS:
        raise MalformedError(f"an array of {value['dtype']!r}")
    flat = np.frombuffer(base64.b64decode(value["data"], validate=True), dtype=np.dtype("<" + value["dtype"]))
    return flat.reshape(_counts(value["shape"]), order="F" if value["fortran"] else "C").copy()
