"""Files that each rank wrote with ``torch.save``: state dicts of FSDP2, whose tensors are DTensors (torch 2.13).

A DTensor is pickled with its local tensor, its placements, and its rank's coordinate in the mesh. So the files of all
ranks are put together by what they say, and not by their names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.compat.checkpoints.dcp import ChunkSizes, DcpChunk, DcpEntry, assemble_chunks
from lockstep.compat.checkpoints.reader import ForeignReader
from lockstep.compat.checkpoints.tensors import MalformedError, StoredObject, counts
from lockstep.errors import CheckpointError

_DTENSOR = "torch.distributed.tensor.DTensor"
_KINDS = {
    "shard": "torch.distributed.tensor.placement_types.Shard",
    "strided": "torch.distributed.tensor.placement_types._StridedShard",
    "replicate": "torch.distributed.tensor.placement_types.Replicate",
}
_WAY_OUT = (
    "Pass the folder with the files of all ranks, or save whole tensors: get_model_state_dict with "
    "StateDictOptions(full_state_dict=True)."
)


def has_shards(value: object) -> bool:
    """Return whether a DTensor is somewhere in nested containers."""
    if isinstance(value, StoredObject):
        return value.name == _DTENSOR
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(map(has_shards, inner))


def join_ranks(reader: ForeignReader, files: Sequence[str], values: Sequence[Any], where: str = "") -> Any:
    """Return the value of all ranks with whole tensors, from what each file holds; the first one has the rest.

    Raises:
        CheckpointError: a rank is missing, or the files do not fit together.
    """
    first = values[0]
    if not any(map(has_shards, values)):
        return first
    if isinstance(first, StoredObject):
        try:
            return _whole(reader, files, values, where)
        except (AttributeError, TypeError, ValueError, IndexError, MalformedError) as error:
            raise reader.broken(files[0], f"{where} is no DTensor ({type(error).__name__})") from None
    inner = [dict(enumerate(value)) if isinstance(value, list) else value for value in values]
    if any(not isinstance(value, dict) or value.keys() != inner[0].keys() for value in inner):
        raise CheckpointError(
            f"{reader.path(files[0])} and the files of other ranks differ in the entries of {where or 'their dicts'}, "
            f"so nothing says how they belong together. {_WAY_OUT}"
        )
    found = {
        key: join_ranks(reader, files, [value[key] for value in inner], f"{where}[{key!r}]")
        for key in inner[0]
    }
    # Beside shards, a tensor that is no DTensor may be the part of a rank.
    plain = {key: value for key, value in inner[0].items() if isinstance(value, torch.Tensor)}
    if any(isinstance(value, StoredObject) for value in inner[0].values()) and not all(
        isinstance(one[key], torch.Tensor) and torch.equal(one[key], plain[key])
        for one in inner
        for key in plain
    ):
        raise CheckpointError(
            f"{reader.path(files[0])} has a tensor in {where or 'its dict'} that is no DTensor, and has other values "
            f"in other files. {_WAY_OUT}"
        )
    return found if isinstance(first, dict) else list(found.values())


def _whole(
    reader: ForeignReader, files: Sequence[str], shards: Sequence[StoredObject], where: str
) -> torch.Tensor:
    """Put a tensor together. Raises TypeError or others where a shard is not of the form that torch writes."""
    meshes = [shard.get("_spec").get("mesh") for shard in shards]
    if (ranks := len(meshes[0].get("_flatten_rank_map") or files)) != len(files):
        raise CheckpointError(
            f"{reader.path(files[0])} has a part of each tensor: that of 1 of {ranks} ranks, and {len(files)} of their "
            f"files are here. {_WAY_OUT}"
        )
    if any(list(axes) != sorted(axes) for _, axes in shards[0].get("_spec").get("shard_order") or ()):
        raise ValueError("an order of its own")
    places = [counts(tuple(mesh.get("_coordinate_on_dim"))) for mesh in meshes]
    sizes = tuple(1 + max(along) for along in zip(*places, strict=True))
    shape = shards[0].get("shape")
    parts: dict[ChunkSizes, tuple[DcpChunk, Any]] = {}
    for file, shard, place in zip(files, shards, places, strict=True):
        offsets, lengths = _span(shape, sizes, place, shard.get("_spec").get("placements"))
        # Replicas lie at the same place.
        parts.setdefault(offsets, (DcpChunk(offsets, lengths, (file, 0, -1)), shard.get("_local_tensor")))
    chunks, tensors = map(list, zip(*parts.values(), strict=True))
    return assemble_chunks(reader, files[0], where, DcpEntry((), shape, tensors[0].dtype, chunks), tensors)


def _span(
    shape: ChunkSizes, sizes: ChunkSizes, place: ChunkSizes, placements: Sequence[StoredObject]
) -> tuple[ChunkSizes, ChunkSizes]:
    """Return where the shard of the rank at ``place`` of a mesh of ``sizes`` lies: offsets and lengths.

    ``Shard`` cuts as ``torch.chunk`` does, in the order of the mesh's axes. ``_StridedShard`` of FSDP comes after
    the ``Shard`` of tensor parallelism, though its axis is before that one.
    """
    offsets, lengths = [0] * len(shape), list(shape)
    for axis in sorted(range(len(placements)), key=lambda axis: placements[axis].name == _KINDS["strided"]):
        kind, dim = placements[axis].name, placements[axis].get("dim")
        if kind == _KINDS["replicate"]:
            continue
        inner = [sizes[i] for i in range(axis + 1, len(sizes)) if placements[i].get("dim") == dim]
        if kind not in _KINDS.values() or placements[axis].get("split_factor") not in (
            None,
            math.prod(inner),
        ):
            raise ValueError(f"the placement {kind}")
        step = -(-lengths[dim] // sizes[axis])
        start = min(place[axis] * step, lengths[dim])
        offsets[dim] += start
        lengths[dim] = min(step, lengths[dim] - start)
    return tuple(offsets), tuple(lengths)
