"""Which rank writes which pieces of which tensors, and which pieces a rank reads: torch DCP's planner.

Replicated tensors are written by one rank each, such that all write about equally many bytes; sharded ones by those
that hold the shards. Reading takes from every piece what lies in the own shard, whatever the layout that was saved.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from lockstep.checkpoint.format.digest import digest_of
from lockstep.checkpoint.format.documents import Index, Piece, TensorEntry, index_to_bytes
from lockstep.checkpoint.format.tensorfile import dtype_name
from lockstep.comm.collectives import Communicator
from lockstep.comm.dtensor import is_dtensor, local
from lockstep.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

SMALLEST_PART_BYTES, LARGEST_PART_BYTES, PARTS = 64 << 20, 4 << 30, 4

Tensors = Mapping[str, torch.Tensor]
Files = dict[str, dict[str, str]]
"""For each file of this rank the names of tensors, this rank's piece of which is in it, by their keys there."""


@dataclass(frozen=True)
class Plan:
    """``index`` tells of all tensors of all ranks, ``mine`` which files this rank writes."""

    index: Index
    mine: Files

    @cached_property
    def index_content(self) -> bytes:
        return index_to_bytes(self.index)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.index.values())


class Planner:
    """Makes plans, collectively, and keeps the last one, as states of one run mostly look alike."""

    def __init__(self) -> None:
        self._looks: list[str] = []
        self._plan: Plan | None = None

    def plan(self, tensors: Tensors, rank: int, ranks: list[int], communicator: Communicator) -> Plan:
        """The plan of this ``rank`` among ``ranks``, those that write one directory together.

        Every rank of the communicator calls it.
        """
        looks = communicator.gather_object(_look(tensors, ranks))
        if self._plan is None or looks != self._looks:
            local_plans = communicator.gather_object([_local_plan(tensors, is_first=rank == ranks[0])])
            self._plan = _global_plan([local_plans[other] for other in ranks], rank, ranks)
            self._looks = looks
        return self._plan


def _look(tensors: Tensors, ranks: list[int]) -> str:
    """A digest of what a plan depends on."""
    described = [
        (name, str(t.dtype), tuple(t.shape), str(getattr(t, "placements", "")), tuple(local(t).shape))
        for name, t in tensors.items()
    ]
    return digest_of(repr((ranks, described)).encode())


def _local_plan(tensors: Tensors, is_first: bool) -> SavePlan:
    from dataclasses import replace

    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=is_first)
    plan = planner.create_local_plan()
    return replace(plan, items=[item for item in plan.items if _has_elements(item)])


def _has_elements(item: WriteItem) -> bool:
    data = item.tensor_data
    assert data is not None
    return math.prod(data.chunk.sizes) > 0 or math.prod(data.size) == 0


def _global_plan(local_plans: list[SavePlan], rank: int, ranks: list[int]) -> Plan:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    _refuse_different(local_plans, ranks)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        plans, _ = planner.create_global_plan(local_plans)
    except (ValueError, AssertionError) as error:
        raise CheckpointError(
            f"The ranks hold different tensors under one name: {error}. Prepare the same objects on every rank."
        ) from error
    index: Index = {}
    mine: Files = {}
    for writer, plan in zip(ranks, plans, strict=True):
        for file, items in _into_files(plan.items, writer).items():
            for item in items:
                piece = _piece_of(item, file)
                _add_piece(index, item, piece)
                if writer == rank:
                    mine.setdefault(file, {})[piece.key] = item.index.fqn
    return Plan(index, mine)


def _refuse_different(local_plans: list[SavePlan], ranks: list[int]) -> None:
    """Raise CheckpointError where ranks hold tensors of different shapes or dtypes under one name."""
    seen: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
    for rank, plan in zip(ranks, local_plans, strict=True):
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            shape, dtype = tuple(data.size), data.properties.dtype
            other, *expected = seen.setdefault(item.index.fqn, (rank, shape, dtype))
            if [shape, dtype] != expected:
                raise CheckpointError(
                    f"{item.index.fqn} is {shape} of {dtype} on rank {rank}, but {expected[0]} of {expected[1]} on "
                    f"rank {other}. Prepare the same objects on every rank."
                )


def _add_piece(index: Index, item: WriteItem, piece: Piece) -> None:
    data = item.tensor_data
    assert data is not None
    name = item.index.fqn
    if name not in index:
        dtype = dtype_name(torch.empty(0, dtype=data.properties.dtype), name)
        index[name] = TensorEntry(dtype=dtype, shape=tuple(data.size), pieces=[])
    index[name].pieces.append(piece)


def _into_files(items: list[WriteItem], rank: int) -> dict[str, list[WriteItem]]:
    """The items by file: models apart from the rest, in parts that can be written at the same time."""
    groups: dict[str, list[WriteItem]] = {}
    for item in items:
        groups.setdefault(group_of(item.index.fqn), []).append(item)
    total = sum(_bytes_of(item) for item in items)
    limit = min(max(total // PARTS, SMALLEST_PART_BYTES), LARGEST_PART_BYTES)
    files = {}
    for group, members in groups.items():
        parts = _parts(members, limit)
        for number, part in enumerate(parts):
            suffix = f"-{number:03d}" if len(parts) > 1 else ""
            files[f"{group}-{rank:05d}{suffix}.safetensors"] = part
    return files


def _parts(items: list[WriteItem], limit: int) -> list[list[WriteItem]]:
    parts: list[list[WriteItem]] = [[]]
    size = 0
    for item in items:
        if parts[-1] and size + _bytes_of(item) > limit:
            parts.append([])
            size = 0
        parts[-1].append(item)
        size += _bytes_of(item)
    return parts


def _bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def group_of(name: str) -> str:
    """The files in which a tensor of this name is: ``model``, ``model_1``, ... or ``state``."""
    match = re.match(r"model\.(\d+)\.", name)
    if match is None:
        return "state"
    return "model" if match[1] == "0" else f"model_{match[1]}"


def _piece_of(item: WriteItem, file: str) -> Piece:
    data = item.tensor_data
    assert data is not None
    name, offsets, shape = item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    key = name if file.startswith("state") else name.split(".", 2)[2]
    if shape != tuple(data.size):
        key += "@" + "x".join(str(offset) for offset in offsets)
    return Piece(file=file, key=key, offsets=offsets, shape=shape)


@dataclass(frozen=True)
class Read:
    """Copy ``lengths`` elements from ``offsets`` on of ``key`` in ``file`` into ``into``, a view of this shape."""

    file: str
    key: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    into: torch.Tensor
    name: str


def reads(places: Mapping[str, torch.Tensor], index: Index) -> list[Read]:
    """What must be read to fill ``places``, whole tensors or DTensors of which each rank holds its part.

    Raises:
        CheckpointError: a tensor is not in the checkpoint or has another shape.
    """
    from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

    found: list[Read] = []
    pieces = {}
    for name, tensor in places.items():
        if name not in index:
            raise CheckpointError(
                f"The checkpoint has no tensor {name}. Load it into what it was saved from."
            )
        if tuple(tensor.shape) != index[name].shape:
            raise CheckpointError(
                f"{name} is {index[name].shape} in the checkpoint, but {tuple(tensor.shape)} here. Load it into what "
                "it was saved from."
            )
        pieces[name] = {piece.offsets: piece for piece in index[name].pieces}
    plan = create_default_local_load_plan(dict(places), _metadata({name: index[name] for name in places}))
    for item in plan.items:
        name = item.dest_index.fqn
        if not math.prod(item.lengths):
            continue
        piece = pieces[name][tuple(item.storage_index.offset or ())]
        into = local(places[name])
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            into = into.narrow(dim, start, length)
        found.append(
            Read(piece.file, piece.key, tuple(item.storage_offsets), tuple(item.lengths), into, name)
        )
    return found


def _metadata(index: Index) -> Any:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    return Metadata(
        {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=entry.torch_dtype),
                size=torch.Size(entry.shape),
                chunks=[
                    ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape))
                    for piece in entry.pieces
                ],
            )
            for name, entry in index.items()
        }
    )


def empty_like(parameter: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Memory for a tensor that is laid out as ``parameter``, if it has its shape, else for the whole of it."""
    if is_dtensor(parameter) and tuple(parameter.shape) == entry.shape:
        return torch.empty_like(parameter, dtype=entry.torch_dtype, requires_grad=False)
    return torch.empty(entry.shape, dtype=entry.torch_dtype, device=local(parameter).device)
