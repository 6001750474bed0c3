"""The format of a checkpoint, version 1: what its JSON files say, checked on reading. See docs/checkpoints.md.

manifest.json              size and BLAKE3 digest of every other file; its own digest; who saved it, and how
tensors.json               dtype, shape and pieces of every tensor
state.json                 what is common to all ranks and no tensor
rank-00000.json, ...       what each rank alone has: generators, place in the data, registered objects
model-00000.safetensors, model_1-00000.safetensors, state-00000.safetensors, ...
                           the pieces of tensors that rank 0, 1, ... wrote
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lockstep.checkpoint.format.digest import FileRecord, digest_of
from lockstep.checkpoint.store.local import MANIFEST, check_name
from lockstep.errors import CheckpointError, UsageError

VERSION = 1
TENSORS, STATE = "tensors.json", "state.json"
LARGEST_JSON_BYTES = 1 << 30
DEEPEST_JSON = 100
"""Containers in containers; so much fits on the stack of what decodes them."""

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

Extent = Annotated[int, Field(ge=0, lt=2**60)]
Sizes = tuple[Extent, ...]
Strict = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileEntry(BaseModel):
    """Size in bytes and BLAKE3 digest of a file."""

    model_config = Strict

    size: Extent
    blake3: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Saved(BaseModel):
    """Who saved a checkpoint, and how."""

    model_config = Strict

    time: str
    world_size: Annotated[int, Field(ge=1, le=2**17)]
    ranks: Annotated[list[Extent], Field(min_length=1)]
    parallel: str
    settings: dict[str, Any]
    versions: dict[str, str]


class Manifest(BaseModel):
    """What belongs to a checkpoint. ``folder`` holds the files, where they don't lie beside the manifest."""

    model_config = Strict

    format: Literal["lockstep-checkpoint"] = "lockstep-checkpoint"
    version: Literal[1] = 1
    folder: Annotated[str, Field(pattern=r"^[a-z0-9-]{0,64}$")] = ""
    saved: Saved
    files: dict[str, FileEntry]

    def to_bytes(self) -> bytes:
        """The manifest as a file that names its own digest."""
        body = self.model_dump()
        return canonical({"blake3": digest_of(canonical(body)), "manifest": body})

    @staticmethod
    def from_bytes(content: bytes, path: str) -> Manifest:
        """The inverse of ``to_bytes``.

        Raises:
            CheckpointError: a bit differs from what was written, or it is of another version.
        """
        document = parse_json(content, path)
        body = document.get("manifest") if isinstance(document, dict) else None
        if not isinstance(body, dict) or document != {"blake3": digest_of(canonical(body)), "manifest": body}:
            raise CheckpointError(
                f"{path} is damaged: its BLAKE3 digest is another. Load another checkpoint."
            )
        if canonical({"blake3": document["blake3"], "manifest": body}) != content:
            raise CheckpointError(f"{path} is damaged: it was written otherwise. Load another checkpoint.")
        if type(body.get("version")) is not int or body["version"] != VERSION:
            raise CheckpointError(
                f"{path} is of format version {body.get('version')}, but this is version {VERSION}. "
                "Load it with the version of Lockstep that wrote it."
            )
        manifest = checked(Manifest, body, path)
        for name in manifest.files:
            if check_name(name) == MANIFEST:
                raise CheckpointError(f"{path} lists itself. Load another checkpoint.")
        return manifest


class Piece(BaseModel):
    """Part of a tensor: ``shape`` elements from ``offsets`` on, under the name ``key`` in ``file``."""

    model_config = Strict

    file: str
    key: str
    offsets: Sizes
    shape: Sizes


class ModelState(BaseModel):
    """What state.json has of a model: names of tied weights by the first name of each, and what is no tensor."""

    model_config = Strict

    ties: dict[str, str]
    extra: dict[str, Any]


class CommonState(BaseModel):
    """state.json. Further keys are the names of objects, their values what ``codec.encode`` returned."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    contents: dict[str, int]
    models: dict[str, ModelState]


class TensorEntry(BaseModel):
    """A tensor, and where its pieces are."""

    model_config = Strict

    dtype: str
    shape: Sizes
    pieces: list[Piece]

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


def _with_tuples(entry: Any) -> Any:
    """JSON's lists, as the tuples that they were."""
    if not isinstance(entry, dict):
        return entry
    pieces = entry.get("pieces")
    if isinstance(pieces, list):
        pieces = [
            _sizes_of(piece, "offsets", "shape") if isinstance(piece, dict) else piece for piece in pieces
        ]
    return _sizes_of({**entry, "pieces": pieces}, "shape")


def _sizes_of(entry: dict[str, Any], *keys: str) -> dict[str, Any]:
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


def overlap(pieces: list[Piece]) -> bool:
    """Whether two pieces share an element: a sweep along the dim that was cut most often."""
    pieces = [piece for piece in pieces if math.prod(piece.shape)]
    if len(pieces) < 2:
        return False
    dims = range(len(pieces[0].shape))
    along = max(dims, key=lambda dim: len({piece.offsets[dim] for piece in pieces}), default=0)
    open_ones: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.offsets[along]):
        open_ones = [o for o in open_ones if o.offsets[along] + o.shape[along] > piece.offsets[along]]
        if any(all(_meet(piece, other, dim) for dim in dims) for other in open_ones):
            return True
        open_ones.append(piece)
    return False


def _meet(one: Piece, other: Piece, dim: int) -> bool:
    return (
        one.offsets[dim] < other.offsets[dim] + other.shape[dim]
        and other.offsets[dim] < one.offsets[dim] + one.shape[dim]
    )


def entry_of(record: FileRecord) -> FileEntry:
    return FileEntry(size=record.size, blake3=record.blake3)


def rank_file(rank: int) -> str:
    """Name of the JSON file of what one rank alone has."""
    return f"rank-{rank:05d}.json"


def canonical(document: Any) -> bytes:
    """One JSON text for each document, in ASCII, with keys in their order.

    Raises:
        UsageError: ``parse_json`` would refuse it, as too deep or too long.
    """
    if _is_deep(document):
        raise UsageError(
            f"A state holds containers nested more than {DEEPEST_JSON} deep, which a checkpoint cannot hold. Let "
            "state_dict() return a flatter one."
        )
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    if len(text) >= LARGEST_JSON_BYTES:
        raise UsageError(
            f"What a state holds beside its tensors is {len(text)} bytes of JSON, but a checkpoint holds fewer than "
            f"{LARGEST_JSON_BYTES}. Let state_dict() return tensors in place of long lists."
        )
    return text.encode("ascii") + b"\n"


def _is_deep(document: Any) -> bool:
    level = [document]
    for _ in range(DEEPEST_JSON + 1):
        level = [item for item in level if isinstance(item, (dict, list, tuple))]
        if not level:
            return False
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return True


def parse_json(content: bytes, path: str) -> Any:
    """A JSON document without duplicate keys and without numbers that JSON lacks, and not too deep.

    Raises:
        CheckpointError: it is none.
    """
    try:
        document = json.loads(
            content.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
        if _is_deep(document):
            raise ValueError(f"it is nested more than {DEEPEST_JSON} deep")
        return document
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no readable JSON: {error}. Load another checkpoint.") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a key is there twice")
    return document


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if number - number == 0 else _refuse_constant(text)


Checked = TypeVar("Checked", bound=BaseModel)


def checked(model: type[Checked], document: Any, path: str) -> Checked:
    """``document`` as ``model``. Raises CheckpointError naming the first place that does not fit."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path}: {place}: {first['msg']}. Load another checkpoint.") from error
