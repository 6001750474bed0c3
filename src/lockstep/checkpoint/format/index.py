"""tensors.json: dtype, shape and chunks of each tensor of a checkpoint, checked without torch."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, Field

from lockstep.checkpoint.format.documents import (
    Extent,
    Manifest,
    Strict,
    canonical,
    check_name,
    checked,
    parse_json,
)
from lockstep.errors import CheckpointError

if TYPE_CHECKING:
    import torch

BITS = {"BOOL": 8, **{name: int(re.findall(r"\d+", name)[0]) for name in (
    "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "BF16", "F32", "F64", "C64", "F8_E4M3", "F8_E5M2",
    "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
)}}  # fmt: skip
"""The dtypes that checkpoints have, by their names in safetensors files, and the size of an element."""

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
        from lockstep.model.dtypes import DTYPES

        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


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
            size = math.prod(chunk.shape) * BITS[entry.dtype] // 8
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
    if entry.dtype not in BITS:
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
