"""The tensors of a checkpoint: tensors.json (dtype, shape and chunks of each), and the safetensors files of the chunks.

Files are written as a stream and read in slices. safetensors' own writer holds a copy of all tensors in memory and does
not say what it wrote; reading is left to the library, which checks the header.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import torch
from pydantic import BaseModel, Field
from safetensors import SafetensorError, safe_open

from lockstep.checkpoint.format.documents import (
    Extent,
    Manifest,
    Strict,
    canonical,
    check_name,
    checked,
    parse_json,
)
from lockstep.comm.collectives import as_bytes
from lockstep.errors import CheckpointError, UsageError
from lockstep.model.dtypes import DTYPES, NAMES

Item = TypeVar("Item")

Sizes = Annotated[tuple[Extent, ...], Field(strict=False)]
"""Not strict, as JSON has lists for tuples; the numbers in it are."""


class ChunkMetadata(BaseModel):
    """Part of a tensor: ``shape`` elements from ``offsets`` on, under the name ``key`` in ``file``."""

    model_config = Strict

    file: str
    key: str
    offsets: Sizes
    shape: Sizes


class TensorEntry(BaseModel):
    """A tensor, and where its chunks are."""

    model_config = Strict

    dtype: str
    shape: Sizes
    pieces: list[ChunkMetadata]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


Index = dict[str, TensorEntry]


def index_to_bytes(index: Index) -> bytes:
    return canonical({name: entry.model_dump() for name, entry in index.items()})


def index_from_bytes(content: bytes, manifest: Manifest, path: str) -> Index:
    """Return the tensors of a checkpoint, by name.

    Raises:
        CheckpointError: chunks lie outside of their tensor or don't fill it, or files of them are not listed.
    """
    document = parse_json(content, path)
    if not isinstance(document, dict):
        raise CheckpointError(
            f"{path} is damaged: its tensors are not a dict of names. Load another checkpoint."
        )
    index = {name: checked(TensorEntry, entry, path) for name, entry in document.items()}
    used: dict[str, int] = {}
    places: set[tuple[str, str]] = set()
    for name, entry in index.items():
        check_chunks(name, entry, path)
        for chunk in entry.pieces:
            if (chunk.file, chunk.key) in places:
                raise CheckpointError(
                    f"{path} places two pieces at {chunk.key!r} in {chunk.file!r}. Load another checkpoint."
                )
            places.add((chunk.file, chunk.key))
            size = math.prod(chunk.shape) * entry.torch_dtype.itemsize
            used[chunk.file] = used.get(chunk.file, 0) + size
    for file, size in used.items():
        if file not in manifest.files or size > manifest.files[file].size:
            raise CheckpointError(
                f"{path} places {size} bytes into {file!r}, which has "
                f"{manifest.files[file].size if file in manifest.files else 'no'} bytes. Load another checkpoint."
            )
    return index


def check_chunks(name: str, entry: TensorEntry, path: str) -> None:
    """Raise CheckpointError unless the chunks of a tensor lie inside of it and fill it once."""
    if entry.dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: {name} has the unknown dtype {entry.dtype!r}. Load another checkpoint."
        )
    # torch's strides would overflow.
    if math.prod(max(size, 1) for size in entry.shape) >= 2**60:
        raise CheckpointError(
            f"{path}: {name} has the impossible shape {entry.shape}. Load another checkpoint."
        )
    filled = 0
    for chunk in entry.pieces:
        check_name(chunk.file)
        inside = len(chunk.offsets) == len(chunk.shape) == len(entry.shape) and all(
            offset + size <= whole
            for offset, size, whole in zip(chunk.offsets, chunk.shape, entry.shape, strict=True)
        )
        if not inside:
            raise CheckpointError(
                f"{path}: a piece of {name} at {chunk.offsets} of shape {chunk.shape} lies outside the tensor's "
                f"shape {entry.shape}. Load another checkpoint."
            )
        filled += math.prod(chunk.shape)
    # Pieces that lie inside, have as many elements as the tensor and do not overlap fill it.
    if filled != math.prod(entry.shape):
        raise CheckpointError(
            f"{path}: the pieces of {name} hold {filled} elements, but its shape {entry.shape} has "
            f"{math.prod(entry.shape)}. Load another checkpoint."
        )
    if overlap(entry.pieces):
        raise CheckpointError(f"{path}: pieces of {name} overlap. Load another checkpoint.")


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


def overlap(chunks: list[ChunkMetadata]) -> bool:
    """Return whether two chunks share an element: a sweep along the dim that was cut most often."""
    chunks = [chunk for chunk in chunks if math.prod(chunk.shape)]
    if len(chunks) < 2:
        return False
    dims = range(len(chunks[0].shape))
    along = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}), default=0)
    # Pieces are met in the order of their first row: only those that have not ended can share one with the next.
    open_ones: list[ChunkMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        open_ones = [o for o in open_ones if o.offsets[along] + o.shape[along] > chunk.offsets[along]]
        if any(all(_overlap_along(chunk, other, dim) for dim in dims) for other in open_ones):
            return True
        open_ones.append(chunk)
    return False


def _overlap_along(one: ChunkMetadata, other: ChunkMetadata, dim: int) -> bool:
    return (
        one.offsets[dim] < other.offsets[dim] + other.shape[dim]
        and other.offsets[dim] < one.offsets[dim] + one.shape[dim]
    )


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
    """``name``, or one like it that a safetensors file can hold and that is not ``taken``."""
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
        """``lengths`` elements from ``offsets`` on of the tensor ``key``; its memory may be the file."""
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
