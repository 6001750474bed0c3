"""Files of tensors in the safetensors format, written as a stream and read in slices.

safetensors' own writer holds a copy of all tensors in memory and does not say what it wrote; reading is left to the
library, which checks the header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError, safe_open

from lockstep.checkpoint.format.index import DTYPE_NAMES
from lockstep.comm.collectives import as_bytes
from lockstep.errors import CheckpointError, UsageError


@dataclass
class TensorFile:
    """Tensors under their names in the file; ``current`` is the one that is being written."""

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str] = field(default_factory=lambda: {"format": "pt"})
    current: str = ""

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The file's content: header, then tensor after tensor, one at a time copied to the host if need be."""
        yield self.header()
        for name, tensor in self.tensors.items():
            self.current = name
            if tensor.numel():
                yield memoryview(as_bytes(tensor.detach().cpu()).numpy())  # type: ignore[arg-type]

    def header(self) -> bytes:
        """The file's first bytes: their number, and where each tensor will be."""
        header: dict[str, object] = {"__metadata__": self.metadata}
        end = 0
        for name, tensor in self.tensors.items():
            dtype = dtype_name(tensor, name)
            begin, end = end, end + tensor.nbytes
            header[name] = {
                "dtype": dtype,
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8 bytes
        return struct.pack("<Q", len(text)) + text


def dtype_name(tensor: torch.Tensor, name: str) -> str:
    """What safetensors calls the tensor's dtype. Raises UsageError where it has none or the layout is not dense."""
    if tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided or tensor.is_nested:
        raise UsageError(
            f"{name} is a tensor of {tensor.dtype}, layout {tensor.layout}, which safetensors files cannot hold. "
            "Convert it in state_dict()."
        )
    return DTYPE_NAMES[tensor.dtype]


class TensorReader:
    """An open file of tensors. Raises CheckpointError where the file is none or differs from what is expected."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise self._error("it", error) from error

    def describe(self, key: str) -> tuple[str, list[int]]:
        """The dtype of the tensor ``key`` by its name in the file, and its shape."""
        try:
            found = self._file.get_slice(key)
            return str(found.get_dtype()), list(found.get_shape())
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise self._error(key, error) from error

    def read(self, key: str, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """``lengths`` elements from ``offsets`` on of the tensor ``key``; its memory may be the file."""
        try:
            if not lengths:
                return self._file.get_tensor(key)
            piece = self._file.get_slice(key)
            if not any(offsets) and list(lengths) == piece.get_shape():
                return self._file.get_tensor(key)
            return piece[
                tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
            ]
        except (SafetensorError, OSError, KeyError, ValueError, IndexError) as error:
            raise self._error(key, error) from error

    def _error(self, what: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what} cannot be read ({error}). Load another checkpoint.")
