"""The safetensors files that hold the chunks of tensors.

Files are written as a stream and read in slices. safetensors' own writer holds a copy of all tensors in memory and does
not say what it wrote; reading is left to the library, which checks the header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open

from lockstep.comm.collectives import as_bytes
from lockstep.errors import CheckpointError, UsageError
from lockstep.model.dtypes import NAMES

Item = TypeVar("Item")


def in_parts(items: Iterable[Item], nbytes: Callable[[Item], int], limit: int) -> list[list[Item]]:
    """Return the items in order, in parts of at most ``limit`` bytes, or of one that is larger."""
    parts: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if parts[-1] and size + nbytes(item) > limit:
            parts.append([])
            size = 0
        parts[-1].append(item)
        size += nbytes(item)
    return parts


METADATA = "__metadata__"
"""The key of a header that is no tensor's."""
LONGEST_HEADER = 100_000_000
"""Bytes that readers of the format accept."""


@dataclass
class TensorFile:
    """Tensors under their names in the file; ``current`` is the one that is being written."""

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str] = field(default_factory=lambda: {"format": "pt"})
    current: str = ""

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the content: header, then tensor after tensor, one at a time copied to the host if need be."""
        yield self.header()
        for name, tensor in self.tensors.items():
            self.current = name
            if tensor.numel():
                yield elements_of(tensor)

    def header(self) -> bytes:
        """Return the file's first bytes: their number, and where each tensor will be."""
        header: dict[str, object] = {METADATA: self.metadata}
        end = 0
        for name, tensor in self.tensors.items():
            check_key(name)
            dtype = dtype_name(tensor, name)
            begin, end = end, end + tensor.nbytes
            header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        # The data begin at a multiple of 8 bytes.
        text += b" " * (-len(text) % 8)
        if len(text) > LONGEST_HEADER:
            raise UsageError(
                f"The names and shapes of {len(self.tensors)} tensors take {len(text)} bytes, but a safetensors file "
                f"has room for {LONGEST_HEADER}. Use fewer tensors, or shorter names."
            )
        return struct.pack("<Q", len(text)) + text


def elements_of(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor of any shape in their order, as bytes in host memory."""
    return as_bytes(tensor.detach().cpu()).numpy().data


def check_key(name: str) -> None:
    """Raise UsageError for a name that no tensor in a safetensors file can have."""
    if name == METADATA or not _is_unicode(name):
        raise UsageError(
            f"A tensor is named {name[:80]!r}, which safetensors files "
            f"{'use for their own data' if name == METADATA else 'cannot hold, because it is not Unicode'}. Give the "
            "parameter or buffer another name."
        )


def free_key(name: str, taken: Collection[str]) -> str:
    """Return ``name``, or one like it that a safetensors file can hold and that is not ``taken``."""
    key = name if _is_unicode(name) else name.encode("utf-8", "backslashreplace").decode()
    while key == METADATA or key in taken:
        key += "'"
    return key


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        # It has half of a surrogate pair.
        return False
    return True


def dtype_name(tensor: torch.Tensor, name: str) -> str:
    """Return what safetensors calls the tensor's dtype. Raises UsageError where it has none or the layout is
    not dense.
    """
    if tensor.dtype not in NAMES or tensor.layout is not torch.strided or tensor.is_nested:
        raise UsageError(
            f"{name} is a tensor of {tensor.dtype}, layout {tensor.layout}, which checkpoints cannot hold. "
            "Convert it in state_dict()."
        )
    return NAMES[tensor.dtype]


class TensorReader:
    """An open file of tensors. Raises CheckpointError where the file is none or differs from what is expected."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise self._error("it", error) from error

    def describe(self, key: str) -> tuple[str, list[int]]:
        """Return the dtype of the tensor ``key`` by its name in the file, and its shape."""
        try:
            found = self._file.get_slice(key)
            return str(found.get_dtype()), list(found.get_shape())
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise self._error(key, error) from error

    def read(self, key: str, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Read ``lengths`` elements from ``offsets`` on of the tensor ``key``; its memory may be the file."""
        try:
            # A tensor without dims has no slices.
            if not lengths:
                return self._file.get_tensor(key)
            stored = self._file.get_slice(key)
            if not any(offsets) and list(lengths) == stored.get_shape():
                return self._file.get_tensor(key)
            return stored[
                tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
            ]
        except (SafetensorError, OSError, KeyError, ValueError, IndexError) as error:
            raise self._error(key, error) from error

    def _error(self, what: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what} cannot be read ({error}). Load another checkpoint.")
