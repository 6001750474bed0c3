"""Which rank writes which chunks of which tensors: plans of single ranks, and the one made of them all. No collective.

A rank holds a tensor in regions: one where it is whole or cut along dimensions, several where it is cut with strides. A
region that several ranks hold is written by one of them, such that all write about equally many bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from lockstep.checkpoint.folders import CheckpointGroup
from lockstep.checkpoint.format.documents import digest_of
from lockstep.checkpoint.format.index import ChunkMetadata, Index, TensorEntry, index_to_bytes, overlap
from lockstep.checkpoint.format.tensors import dtype_name, free_key, in_parts
from lockstep.comm.dtensor import is_dtensor, local, regions_of
from lockstep.comm.layout import ShardRegion, whole_region
from lockstep.errors import CheckpointError

SMALLEST_PART_BYTES, LARGEST_PART_BYTES, PARTS = 64 << 20, 4 << 30, 4

Tensors = Mapping[str, torch.Tensor]
KeysByFile = dict[str, dict[str, str]]
"""For each file of this rank the names of tensors, a chunk of which is in it, by their keys there."""


class LocalShards(NamedTuple):
    """What one rank holds of a tensor; ``is_own``: copies may differ, and the first rank's is the one to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    regions: list[ShardRegion]
    is_own: bool


class WriteItem(NamedTuple):
    """A chunk that a rank writes."""

    source: LocalShards
    region: ShardRegion

    @property
    def nbytes(self) -> int:
        return math.prod(self.region.shape) * self.source.dtype.itemsize


@dataclass(frozen=True)
class SavePlan:
    """``index``: all tensors of all ranks; ``mine``: the files that this rank writes; ``regions``: what is in them."""

    index: Index
    mine: KeysByFile
    regions: dict[tuple[str, str], ShardRegion] = field(default_factory=dict)

    @cached_property
    def index_content(self) -> bytes:
        return index_to_bytes(self.index)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.index.values())

    def content(
        self,
        file: str,
        tensors: Tensors,
        part_of: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: local(tensor),
    ) -> dict[str, torch.Tensor]:
        """Return what this rank writes into ``file``, by the keys there: views of the parts that it has of
        ``tensors``.
        """
        found = {}
        for key, name in self.mine[file].items():
            region, part = self.regions[file, key], part_of(name, tensors[name])
            # A tensor without elements is one whole region, which this rank's empty part need not look like.
            found[key] = region.local_view(part) if math.prod(region.shape) else part.new_empty(region.shape)
        return found


class SavePlanner:
    """Makes plans and keeps the last one, as states of one run mostly look alike.

    A plan depends on all ranks: they exchange signatures, and where one ``is_outdated`` local plans. ``group`` are the
    ranks that write one directory together. Of tensors whose copies may differ (``own``), the copy of the first rank
    that has one is written.
    """

    def __init__(self, group: CheckpointGroup) -> None:
        self._group = group
        self._signatures: list[str] = []
        self._plan: SavePlan | None = None

    def signature(self, tensors: Tensors, own: Collection[str] = ()) -> str:
        """Return a digest of what a plan depends on, of this rank's ``tensors``."""
        # All that a plan depends on, and no values: the same digest on each rank means that the last plan still
        # holds.
        described = [
            (name, name in own, str(t.dtype), tuple(t.shape), tuple(local(t).shape), *_spread(t))
            for name, t in tensors.items()
        ]
        return digest_of(repr((self._group.ranks, described)).encode())

    @property
    def has_plan(self) -> bool:
        """Whether there is a last plan."""
        return self._plan is not None

    def is_outdated(self, signatures: list[str]) -> bool:
        """Return whether the last plan was made for tensors that look otherwise, on any rank."""
        return self._plan is None or signatures != self._signatures

    def create_local_plan(self, tensors: Tensors, own: Collection[str] = ()) -> list[LocalShards]:
        """Return what this rank has."""
        return [_local_shards(name, tensor, name in own) for name, tensor in tensors.items()]

    def create_global_plan(
        self, local_plans: list[list[LocalShards]], signatures: Sequence[str] = ()
    ) -> SavePlan:
        """Decide who writes what, from the plans of all ranks. Returns this rank's part of it.

        Raises:
            CheckpointError: ranks hold different tensors under one name, or not all of one.
        """
        ranks = self._group.ranks
        self._plan = _global_plan([local_plans[rank] for rank in ranks], self._group.rank, ranks)
        self._signatures = list(signatures)
        return self._plan

    @property
    def plan(self) -> SavePlan:
        """The last plan."""
        assert self._plan is not None
        return self._plan


def _spread(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return where a DTensor's part lies in it."""
    if not is_dtensor(tensor):
        return ()
    mesh = tensor.device_mesh
    return str(tensor.placements), str(tuple(mesh.shape)), str(mesh.get_coordinate())


def _local_shards(name: str, tensor: torch.Tensor, is_own: bool) -> LocalShards:
    # One empty chunk says that there is a tensor without elements.
    found = regions_of(tensor) if tensor.numel() else [whole_region(tensor.shape)]
    return LocalShards(name, tensor.dtype, tuple(tensor.shape), found, is_own)


def _global_plan(local_plans: list[list[LocalShards]], rank: int, ranks: list[int]) -> SavePlan:
    _refuse_different(local_plans, ranks)
    index: Index = {}
    mine: KeysByFile = {}
    regions: dict[tuple[str, str], ShardRegion] = {}
    # Every rank makes the whole plan from the same local plans, so nothing of it has to be sent.
    for writer, items in zip(ranks, _deduplicated(local_plans), strict=True):
        for file, of_file in _into_files(items, writer).items():
            taken: set[str] = set()
            for item in of_file:
                chunk = _chunk_of(item, file, taken)
                taken.add(chunk.key)
                _add_chunk(index, item, chunk)
                if writer == rank:
                    mine.setdefault(file, {})[chunk.key] = item.source.name
                    regions[chunk.file, chunk.key] = item.region
    _refuse_incomplete(index)
    return SavePlan(index, mine, regions)


def _deduplicated(local_plans: list[list[LocalShards]]) -> list[list[WriteItem]]:
    """Return what each rank writes: of the ranks that hold the same region, that with the fewest bytes so
    far.
    """
    holders: dict[tuple[object, ...], list[tuple[int, WriteItem]]] = {}
    for number, of_rank in enumerate(local_plans):
        for one in of_rank:
            for region in one.regions:
                # Regions with equal offsets and shapes are copies of one part, on ranks that replicate it.
                found = holders.setdefault((one.name, region.offsets, region.shape), [])
                # Copies that may differ have one candidate: who writes them is not a matter of bytes.
                if not (one.is_own and found):
                    found.append((number, WriteItem(one, region)))
    items: list[list[WriteItem]] = [[] for _ in local_plans]
    sizes = [0] * len(local_plans)
    # All ranks see the holders in one order, so that each comes to the same choice by itself.
    for candidates in holders.values():
        number, item = min(candidates, key=lambda candidate: sizes[candidate[0]])
        items[number].append(item)
        sizes[number] += item.nbytes
    return items


def _refuse_different(local_plans: list[list[LocalShards]], ranks: list[int]) -> None:
    """Raise CheckpointError where ranks hold tensors of different shapes or dtypes under one name."""
    seen: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
    for rank, of_rank in zip(ranks, local_plans, strict=True):
        for one in of_rank:
            other, shape, dtype = seen.setdefault(one.name, (rank, one.shape, one.dtype))
            if (one.shape, one.dtype) != (shape, dtype):
                raise CheckpointError(
                    f"{one.name} is {one.shape} of {one.dtype} on rank {rank}, but {shape} of {dtype} on rank {other}. "
                    "Prepare the same objects on every rank."
                )


def _refuse_incomplete(index: Index) -> None:
    """Raise CheckpointError where what the ranks hold of a tensor does not fill it, or overlaps."""
    for name, entry in index.items():
        # Regions inside a tensor that do not overlap fill it if their elements add up to its own.
        total = sum(math.prod(chunk.shape) for chunk in entry.pieces)
        if total != math.prod(entry.shape) or overlap(entry.pieces):
            raise CheckpointError(
                f"The ranks hold different tensors under one name: their parts of {name} have {total} elements, "
                f"but its shape {entry.shape} has {math.prod(entry.shape)}. Prepare the same objects on every "
                "rank."
            )


def _add_chunk(index: Index, item: WriteItem, chunk: ChunkMetadata) -> None:
    name, dtype, shape, *_ = item.source
    if name not in index:
        dtype_text = dtype_name(torch.empty(0, dtype=dtype), name)
        index[name] = TensorEntry(dtype=dtype_text, shape=shape, pieces=[])
    index[name].pieces.append(chunk)


def _into_files(items: list[WriteItem], rank: int) -> dict[str, list[WriteItem]]:
    """Return the items by file: models apart from the rest, in parts that can be written at the same time."""
    # Models apart from the rest: other libraries read model files alone.
    groups: dict[str, list[WriteItem]] = {}
    for item in items:
        groups.setdefault(group_of(item.source.name), []).append(item)
    total = sum(item.nbytes for item in items)
    # A few files for each rank, so that threads can write them at the same time; no small ones, and none too large to
    # copy.
    limit = min(max(total // PARTS, SMALLEST_PART_BYTES), LARGEST_PART_BYTES)
    files = {}
    for group, members in groups.items():
        parts = in_parts(members, lambda item: item.nbytes, limit)
        for number, part in enumerate(parts):
            suffix = f"-{number:03d}" if len(parts) > 1 else ""
            files[f"{group}-{rank:05d}{suffix}.safetensors"] = part
    return files


def group_of(name: str) -> str:
    """Return the files in which a tensor of this name is: ``model``, ``model_1``, ... or ``state``."""
    match = re.match(r"model\.(\d+)\.", name)
    if match is None:
        return "state"
    return "model" if match[1] == "0" else f"model_{match[1]}"


def _chunk_of(item: WriteItem, file: str, taken: Collection[str]) -> ChunkMetadata:
    name, (offsets, shape, _) = item.source.name, item.region
    key = name if file.startswith("state") else name.split(".", 2)[2]
    # A part gets the place of its first element as its name: other libraries see at once that it is not the whole.
    if shape != item.source.shape:
        key += "@" + "x".join(str(offset) for offset in offsets)
    return ChunkMetadata(file=file, key=free_key(key, taken), offsets=offsets, shape=shape)
