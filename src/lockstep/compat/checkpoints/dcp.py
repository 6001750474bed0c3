"""A folder of ``torch.distributed.checkpoint``: ``.metadata`` and the ``.distcp`` files that it points into.

``.metadata`` says for each name the chunks of its tensor (offsets and sizes) or that it is any object; and for
each chunk the file, offset and length of what ``torch.save`` wrote there. Names are paths of nested dicts and
lists, joined by dots; ``planner_data`` has the paths.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from lockstep.comm.tree import StateDict
from lockstep.compat.checkpoints.reader import FilePart, ForeignReader
from lockstep.compat.checkpoints.tensors import StoredObject

METADATA = ".metadata"
MAX_DEPTH = 60
# Chunks of one tensor: as many as ranks that each have a part of it.
MAX_CHUNKS = 2**14
_CLASSES = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
ChunkSizes = tuple[int, ...]


@dataclass(frozen=True)
class DcpChunk:
    """A part of a tensor, and where it lies."""

    offsets: ChunkSizes
    sizes: ChunkSizes
    file_part: FilePart


@dataclass(frozen=True)
class DcpEntry:
    """What the metadata says of one name: a tensor's shape, dtype and chunks, or one object."""

    path: tuple[str | int, ...]
    shape: ChunkSizes | None
    dtype: torch.dtype | None
    chunks: list[DcpChunk]


def read_dcp(reader: ForeignReader, folder: str, tensors_only: bool = False) -> dict[str, object]:
    """Return the nested dict that was saved in ``folder`` (``""``: the source itself), with whole tensors.

    ``tensors_only``: objects are neither read nor returned.

    Raises:
        CheckpointError: a file is missing, points out of the folder, or does not hold what the metadata says.
    """
    prefix = f"{folder}/" if folder else ""
    name = prefix + METADATA
    described = _entries(reader, name, prefix).items()
    entries = {key: entry for key, entry in described if not tensors_only or entry.shape is not None}
    file_parts = [chunk.file_part for entry in entries.values() for chunk in entry.chunks]
    values = iter(reader.read_parts(file_parts))
    nested = _NestedContainer()
    for key, entry in entries.items():
        parts = [next(values) for _ in entry.chunks]
        value = parts[0] if entry.shape is None else assemble_chunks(reader, name, key, entry, parts)
        if not _set_nested(nested, entry.path, value):
            raise reader.broken(name, f"{key!r} is not in the dict that was saved")
    try:
        whole: StateDict = _lists(nested)
    except ValueError as error:
        raise reader.broken(name, str(error)) from None
    return whole


def _entries(reader: ForeignReader, name: str, prefix: str) -> dict[str, DcpEntry]:
    metadata = reader.read(name)
    try:
        described, placed = metadata.state["state_dict_metadata"], metadata.state["storage_data"]
        paths = metadata.state.get("planner_data") or {}
        file_parts = {_index(index): _file_part(info, prefix) for index, info in placed.items()}
        entries = {key: _entry(key, about, file_parts, paths) for key, about in described.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise reader.broken(name, f"it is not the metadata of a distributed checkpoint ({reason})") from None
    unused = file_parts.keys() - {
        (key, chunk.offsets) for key, entry in entries.items() for chunk in entry.chunks
    }
    if unused - {(key, None) for key in entries}:
        raise reader.broken(name, f"{len(unused)} of its chunks do not belong to any tensor")
    return entries


def _is(value: object, name: str) -> TypeGuard[StoredObject]:
    return isinstance(value, StoredObject) and value.name == name and isinstance(value.state, dict)


def _index(index: object) -> tuple[str, ChunkSizes | None]:
    if not _is(index, _CLASSES + "MetadataIndex") or not isinstance(index.get("fqn"), str):
        raise ValueError("a place without a name")
    offset = index.get("offset")
    return index.get("fqn"), None if offset is None else _sizes(offset)


def _file_part(info: Any, prefix: str) -> FilePart:
    if not _is(info, _STORAGE_INFO):
        raise ValueError("a place that is not in a file")
    file, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
    # No slash, and no dot at its beginning: nothing outside of the folder is named so.
    if not isinstance(file, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", file):
        raise ValueError(f"the file name {str(file)[:80]!r}, which is not a plain name in its folder")
    if info.get("transform_descriptors"):
        raise ValueError(f"{file} is transformed by {info.get('transform_descriptors')}, such as compressed")
    _sizes((start, length))
    return prefix + file, start, length


def _sizes(value: object) -> ChunkSizes:
    if not isinstance(value, tuple) or any(type(size) is not int or size < 0 for size in value):
        raise ValueError(f"the sizes {str(value)[:80]}")
    return value


def _entry(key: Any, about: Any, file_parts: dict[Any, FilePart], paths: dict[str, Any]) -> DcpEntry:
    path = paths.get(key, (key,))
    path = (path,) if isinstance(path, str) else tuple(path)
    if (
        not isinstance(key, str)
        or not 0 < len(path) <= MAX_DEPTH
        or any(type(s) not in (str, int) for s in path)
    ):
        raise ValueError(f"the path {str(path)[:80]} of {str(key)[:80]!r}")
    if isinstance(about, StoredObject) and about.name == _CLASSES + "BytesStorageMetadata":
        return DcpEntry(path, None, None, [DcpChunk((), (), file_parts[key, None])])
    if not _is(about, _CLASSES + "TensorStorageMetadata"):
        raise ValueError(f"{key!r} is neither a tensor nor an object")
    # TensorProperties is pickled as a tuple, of which the dtype is the first.
    dtype = about.get("properties").state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key!r} has no dtype")
    if len(about.get("chunks")) > MAX_CHUNKS:
        raise ValueError(f"{len(about.get('chunks'))} chunks of {key!r}, more than {MAX_CHUNKS}")
    chunks = []
    for chunk in about.get("chunks"):
        offsets, sizes = _sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))
        chunks.append(DcpChunk(offsets, sizes, file_parts[key, offsets]))
    return DcpEntry(path, _sizes(about.get("size")), dtype, chunks)


def assemble_chunks(
    reader: ForeignReader, name: str, key: str, entry: DcpEntry, parts: list[Any]
) -> torch.Tensor:
    """Return the tensor, put together from its chunks, which must cover it exactly once."""
    assert entry.shape is not None
    assert entry.dtype is not None
    for chunk, part in zip(entry.chunks, parts, strict=True):
        fits = (
            isinstance(part, torch.Tensor) and part.dtype == entry.dtype and tuple(part.shape) == chunk.sizes
        )
        inside = len(chunk.sizes) == len(entry.shape) and all(
            offset + size <= length
            for offset, size, length in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)
        )
        if not fits or not inside:
            raise reader.broken(
                chunk.file_part[0], f"the chunk of {key!r} at {chunk.offsets} is not {chunk.sizes}"
            )
    # Chunks inside that have as many elements as the tensor, none of them twice, fill it.
    covered, count = sum(_element_count(chunk.sizes) for chunk in entry.chunks), _element_count(entry.shape)
    if covered != count:
        raise reader.broken(name, f"the chunks of {key!r} have {covered} elements, but it has {count}")
    if _overlap(entry.chunks):
        raise reader.broken(name, f"two chunks of {key!r} overlap")
    if len(parts) == 1:
        only: torch.Tensor = parts[0]
        return only
    whole = reader.scratch.empty(entry.shape, entry.dtype)
    for chunk, part in zip(entry.chunks, parts, strict=True):
        place = whole
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            place = place.narrow(dim, offset, size)
        place.copy_(part)
    return whole


def _element_count(sizes: ChunkSizes) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _overlap(chunks: list[DcpChunk]) -> bool:
    """Return whether two chunks share an element. Sorted along the dim that is cut most, far ones are not compared."""
    filled = [chunk for chunk in chunks if _element_count(chunk.sizes)]
    dims = range(len(filled[0].offsets)) if filled else ()
    dim = max(dims, key=lambda d: len({chunk.offsets[d] for chunk in filled}), default=None)
    if dim is None:
        return len(filled) > 1
    ordered = sorted(filled, key=lambda chunk: chunk.offsets[dim])
    for i, one in enumerate(ordered):
        end = one.offsets[dim] + one.sizes[dim]
        for other in ordered[i + 1 :]:
            if other.offsets[dim] >= end:
                break
            spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
            if all(a < c + d and c < a + b for a, b, c, d in spans):
                return True
    return False


def _set_nested(nested: dict[object, Any], path: tuple[object, ...], value: object) -> bool:
    """Set the place that ``path`` leads to; positions of lists are keys for now. False: something else is there."""
    *outer, last = path
    here = nested
    for step in outer:
        here = here.setdefault(step, _NestedContainer())
        if not isinstance(here, _NestedContainer):
            return False
    if last in here:
        return False
    here[last] = value
    return True


class _NestedContainer(dict[object, object]):
    """A dict or list that is being filled."""


def _lists(value: object) -> Any:
    """Nodes as dicts, those with positions for keys as lists. Raises ValueError for a list with gaps."""
    if not isinstance(value, _NestedContainer):
        return value
    inner = {key: _lists(item) for key, item in value.items()}
    if not any(type(key) is int for key in inner):
        return inner
    if set(inner) != set(range(len(inner))):
        raise ValueError(f"a list has the positions {sorted(map(str, inner))[:5]}")
    return [inner[i] for i in range(len(inner))]
