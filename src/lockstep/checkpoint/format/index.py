"""tensors.json: dtype, shape and pieces of every tensor."""

from __future__ import annotations

import math

import torch
from pydantic import BaseModel

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

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""The dtypes of safetensors files by their names there."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Sizes = tuple[Extent, ...]


class ChunkMetadata(BaseModel):
    """Part of a tensor: ``shape`` elements from ``offsets`` on, under the name ``key`` in ``file``."""

    model_config = Strict

    file: str
    key: str
    offsets: Sizes
    shape: Sizes


class TensorEntry(BaseModel):
    """A tensor, and where its pieces are."""

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
    """The tensors of a checkpoint, by name.

    Raises:
        CheckpointError: pieces lie outside of their tensor or don't fill it, or files of them are not listed.
    """
    document = parse_json(content, path)
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} holds no tensors by name. Load another checkpoint.")
    index = {name: checked(TensorEntry, _with_tuples(entry), path) for name, entry in document.items()}
    used: dict[str, int] = {}
    places: set[tuple[str, str]] = set()
    for name, entry in index.items():
        _check_pieces(name, entry, path)
        for piece in entry.pieces:
            if (piece.file, piece.key) in places:
                raise CheckpointError(
                    f"{path} places two pieces at {piece.key!r} in {piece.file!r}. Load another checkpoint."
                )
            places.add((piece.file, piece.key))
            size = math.prod(piece.shape) * entry.torch_dtype.itemsize
            used[piece.file] = used.get(piece.file, 0) + size
    for file, size in used.items():
        if file not in manifest.files or size > manifest.files[file].size:
            raise CheckpointError(
                f"{path} places {size} bytes into {file!r}, which has "
                f"{manifest.files[file].size if file in manifest.files else 'no'} bytes. Load another checkpoint."
            )
    return index


def _with_tuples(entry: object) -> object:
    """JSON's lists, as the tuples that they were."""
    if not isinstance(entry, dict):
        return entry
    pieces = entry.get("pieces")
    if isinstance(pieces, list):
        pieces = [
            _sizes_of(piece, "offsets", "shape") if isinstance(piece, dict) else piece for piece in pieces
        ]
    return _sizes_of({**entry, "pieces": pieces}, "shape")


def _sizes_of(entry: dict[str, object], *keys: str) -> dict[str, object]:
    found = {key: entry.get(key) for key in keys}
    return {**entry, **{key: tuple(value) for key, value in found.items() if isinstance(value, list)}}


def _check_pieces(name: str, entry: TensorEntry, path: str) -> None:
    if entry.dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: {name} has the unknown dtype {entry.dtype!r}. Load another checkpoint."
        )
    if math.prod(max(size, 1) for size in entry.shape) >= 2**60:  # torch's strides would overflow
        raise CheckpointError(
            f"{path}: {name} has the impossible shape {entry.shape}. Load another checkpoint."
        )
    filled = 0
    for piece in entry.pieces:
        check_name(piece.file)
        inside = len(piece.offsets) == len(piece.shape) == len(entry.shape) and all(
            offset + size <= whole
            for offset, size, whole in zip(piece.offsets, piece.shape, entry.shape, strict=True)
        )
        if not inside:
            raise CheckpointError(
                f"{path}: a piece of {name} at {piece.offsets} of shape {piece.shape} lies outside of the tensor's "
                f"{entry.shape}. Load another checkpoint."
            )
        filled += math.prod(piece.shape)
    if filled != math.prod(entry.shape):
        raise CheckpointError(
            f"{path}: the pieces of {name} hold {filled} elements, but its shape {entry.shape} has "
            f"{math.prod(entry.shape)}. Load another checkpoint."
        )
    if overlap(entry.pieces):
        raise CheckpointError(f"{path}: pieces of {name} overlap. Load another checkpoint.")


def overlap(pieces: list[ChunkMetadata]) -> bool:
    """Whether two pieces share an element: a sweep along the dim that was cut most often."""
    pieces = [piece for piece in pieces if math.prod(piece.shape)]
    if len(pieces) < 2:
        return False
    dims = range(len(pieces[0].shape))
    along = max(dims, key=lambda dim: len({piece.offsets[dim] for piece in pieces}), default=0)
    open_ones: list[ChunkMetadata] = []
    for piece in sorted(pieces, key=lambda piece: piece.offsets[along]):
        open_ones = [o for o in open_ones if o.offsets[along] + o.shape[along] > piece.offsets[along]]
        if any(all(_meet(piece, other, dim) for dim in dims) for other in open_ones):
            return True
        open_ones.append(piece)
    return False


def _meet(one: ChunkMetadata, other: ChunkMetadata, dim: int) -> bool:
    return (
        one.offsets[dim] < other.offsets[dim] + other.shape[dim]
        and other.offsets[dim] < one.offsets[dim] + one.shape[dim]
    )
