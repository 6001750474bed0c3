"""Which rank writes which pieces of which tensors, and which pieces a rank reads.

A rank holds a tensor in boxes: one where it is whole or cut along dimensions, several where it is cut with strides. A
box that several ranks hold is written by one of them, such that all write about equally many bytes. Reading takes from
every piece what lies in the own boxes, whatever the layout that was saved.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from lockstep.checkpoint.format.digest import digest_of
from lockstep.checkpoint.format.documents import Index, Piece, TensorEntry, index_to_bytes, overlap
from lockstep.checkpoint.format.tensorfile import dtype_name
from lockstep.comm.collectives import Communicator
from lockstep.comm.dtensor import boxes_of, is_dtensor, local
from lockstep.comm.layout import Box, whole_box
from lockstep.errors import CheckpointError

SMALLEST_PART_BYTES, LARGEST_PART_BYTES, PARTS = 64 << 20, 4 << 30, 4

Tensors = Mapping[str, torch.Tensor]
Files = dict[str, dict[str, str]]
"""For each file of this rank the names of tensors, a piece of which is in it, by their keys there."""


class Held(NamedTuple):
    """What one rank holds of a tensor; ``is_own``: copies may differ, and the first rank's is the one to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: list[Box]
    is_own: bool


class Item(NamedTuple):
    """A piece that a rank writes."""

    held: Held
    box: Box

    @property
    def nbytes(self) -> int:
        return math.prod(self.box.shape) * self.held.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """``index`` tells of all tensors of all ranks, ``mine`` which files this rank writes, ``boxes`` what is in them."""

    index: Index
    mine: Files
    boxes: dict[tuple[str, str], Box] = field(default_factory=dict)

    @cached_property
    def index_content(self) -> bytes:
        return index_to_bytes(self.index)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.index.values())

    def content(self, file: str, tensors: Tensors) -> dict[str, torch.Tensor]:
        """What this rank writes into ``file``, by the keys there: views of ``tensors``."""
        found = {}
        for key, name in self.mine[file].items():
            box, part = self.boxes[file, key], local(tensors[name])
            found[key] = box.of(part) if math.prod(box.shape) else part.new_empty(box.shape)
        return found


class Planner:
    """Makes plans, collectively, and keeps the last one, as states of one run mostly look alike."""

    def __init__(self) -> None:
        self._looks: list[str] = []
        self._plan: Plan | None = None

    def plan(
        self,
        tensors: Tensors,
        rank: int,
        ranks: list[int],
        communicator: Communicator,
        own: Collection[str] = (),
    ) -> Plan:
        """The plan of this ``rank`` among ``ranks``, those that write one directory together.

        Every rank of the communicator calls it. Of tensors whose copies may differ (``own``), the copy of the first
        rank that has one is written.

        Raises:
            CheckpointError: ranks hold different tensors under one name, or not all of one.
        """
        looks = communicator.gather_object(_look(tensors, ranks, own))
        if self._plan is None or looks != self._looks:
            held = [_held(name, tensor, name in own) for name, tensor in tensors.items()]
            everywhere = communicator.gather_object([held])
            self._plan = _global_plan([everywhere[other] for other in ranks], rank, ranks)
            self._looks = looks
        return self._plan


def _look(tensors: Tensors, ranks: list[int], own: Collection[str]) -> str:
    """A digest of what a plan depends on."""
    described = [
        (name, name in own, str(t.dtype), tuple(t.shape), tuple(local(t).shape), *_spread(t))
        for name, t in tensors.items()
    ]
    return digest_of(repr((ranks, described)).encode())


def _spread(tensor: torch.Tensor) -> tuple[str, ...]:
    """Where a DTensor's part lies in it."""
    if not is_dtensor(tensor):
        return ()
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    return str(tensor.placements), str(tuple(mesh.shape)), str(mesh.get_coordinate())  # type: ignore[attr-defined]


def _held(name: str, tensor: torch.Tensor, is_own: bool) -> Held:
    # One empty piece says that there is a tensor without elements.
    found = boxes_of(tensor) if tensor.numel() else [whole_box(tensor.shape)]
    return Held(name, tensor.dtype, tuple(tensor.shape), found, is_own)


def _global_plan(held: list[list[Held]], rank: int, ranks: list[int]) -> Plan:
    _refuse_different(held, ranks)
    index: Index = {}
    mine: Files = {}
    boxes: dict[tuple[str, str], Box] = {}
    for writer, items in zip(ranks, _dealt(held), strict=True):
        for file, of_file in _into_files(items, writer).items():
            for item in of_file:
                piece = _piece_of(item, file)
                _add_piece(index, item, piece)
                if writer == rank:
                    mine.setdefault(file, {})[piece.key] = item.held.name
                    boxes[piece.file, piece.key] = item.box
    _refuse_incomplete(index)
    return Plan(index, mine, boxes)


def _dealt(held: list[list[Held]]) -> list[list[Item]]:
    """What each rank writes: of the ranks that hold the same box, that with the fewest bytes so far."""
    holders: dict[tuple[object, ...], list[tuple[int, Item]]] = {}
    for number, of_rank in enumerate(held):
        for one in of_rank:
            for box in one.boxes:
                found = holders.setdefault((one.name, box.offsets, box.shape), [])
                if not (one.is_own and found):
                    found.append((number, Item(one, box)))
    items: list[list[Item]] = [[] for _ in held]
    sizes = [0] * len(held)
    for candidates in holders.values():
        number, item = min(candidates, key=lambda candidate: sizes[candidate[0]])
        items[number].append(item)
        sizes[number] += item.nbytes
    return items


def _refuse_different(held: list[list[Held]], ranks: list[int]) -> None:
    """Raise CheckpointError where ranks hold tensors of different shapes or dtypes under one name."""
    seen: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
    for rank, of_rank in zip(ranks, held, strict=True):
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
        total = sum(math.prod(piece.shape) for piece in entry.pieces)
        if total != math.prod(entry.shape) or overlap(entry.pieces):
            raise CheckpointError(
                f"The ranks hold different tensors under one name: their parts of {name} have {total} elements, but "
                f"its shape {entry.shape} has {math.prod(entry.shape)}. Prepare the same objects on every rank."
            )


def _add_piece(index: Index, item: Item, piece: Piece) -> None:
    name, dtype, shape, *_ = item.held
    if name not in index:
        said = dtype_name(torch.empty(0, dtype=dtype), name)
        index[name] = TensorEntry(dtype=said, shape=shape, pieces=[])
    index[name].pieces.append(piece)


def _into_files(items: list[Item], rank: int) -> dict[str, list[Item]]:
    """The items by file: models apart from the rest, in parts that can be written at the same time."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.held.name), []).append(item)
    total = sum(item.nbytes for item in items)
    limit = min(max(total // PARTS, SMALLEST_PART_BYTES), LARGEST_PART_BYTES)
    files = {}
    for group, members in groups.items():
        parts = _parts(members, limit)
        for number, part in enumerate(parts):
            suffix = f"-{number:03d}" if len(parts) > 1 else ""
            files[f"{group}-{rank:05d}{suffix}.safetensors"] = part
    return files


def _parts(items: list[Item], limit: int) -> list[list[Item]]:
    parts: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if parts[-1] and size + item.nbytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(item)
        size += item.nbytes
    return parts


def group_of(name: str) -> str:
    """The files in which a tensor of this name is: ``model``, ``model_1``, ... or ``state``."""
    match = re.match(r"model\.(\d+)\.", name)
    if match is None:
        return "state"
    return "model" if match[1] == "0" else f"model_{match[1]}"


def _piece_of(item: Item, file: str) -> Piece:
    name, (offsets, shape, _) = item.held.name, item.box
    key = name if file.startswith("state") else name.split(".", 2)[2]
    if shape != item.held.shape:
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
    return reads_as({name: (name, place) for name, place in places.items()}, index)


def reads_as(places: Mapping[str, tuple[str, torch.Tensor]], index: Index) -> list[Read]:
    """As ``reads``, of places that are known by other names than the tensors, which stand first in the pairs."""
    found: list[Read] = []
    for name, (saved, tensor) in places.items():
        if saved not in index:
            raise CheckpointError(
                f"The checkpoint has no tensor {saved}. Load it into what it was saved from."
            )
        if tuple(tensor.shape) != index[saved].shape:
            raise CheckpointError(
                f"{name} is {index[saved].shape} in the checkpoint, but {tuple(tensor.shape)} here. Load it into what "
                "it was saved from."
            )
        if not tensor.numel():
            continue
        pieces, part = _Pieces(index[saved]), local(tensor)
        for box in boxes_of(tensor):
            for piece in pieces.near(box):
                one = _read_of(piece, box, part, saved)
                if one is not None:
                    found.append(one)
    return found


class _Pieces:
    """The pieces of a tensor, sorted along the dimension in which it was cut most often."""

    def __init__(self, entry: TensorEntry) -> None:
        dims = range(len(entry.shape))
        self._dim = max(
            dims, key=lambda dim: len({piece.offsets[dim] for piece in entry.pieces}), default=None
        )
        if self._dim is None:
            self._pieces, self._starts, self._longest = entry.pieces, [0] * len(entry.pieces), 0
        else:
            dim = self._dim
            self._pieces = sorted(entry.pieces, key=lambda piece: piece.offsets[dim])
            self._starts = [piece.offsets[dim] for piece in self._pieces]
            self._longest = max((piece.shape[dim] for piece in self._pieces), default=0)

    def near(self, box: Box) -> Iterator[Piece]:
        """All pieces that may share elements with the box."""
        if self._dim is None:
            yield from self._pieces
            return
        start = box.offsets[self._dim]
        first = bisect_right(self._starts, start - self._longest)
        last = bisect_left(self._starts, start + box.shape[self._dim])
        yield from self._pieces[first:last]


def _read_of(piece: Piece, box: Box, part: torch.Tensor, name: str) -> Read | None:
    """What of the piece belongs into the box of this rank's part; None if nothing does."""
    starts = tuple(map(max, box.offsets, piece.offsets))
    lengths = tuple(
        min(offset + count, other + size) - start
        for start, offset, count, other, size in zip(
            starts, box.offsets, box.shape, piece.offsets, piece.shape, strict=True
        )
    )
    if any(length <= 0 for length in lengths):
        return None
    from_ = tuple(start - offset for start, offset in zip(starts, piece.offsets, strict=True))
    inside = tuple(
        start - offset + place for start, offset, place in zip(starts, box.offsets, box.inside, strict=True)
    )
    return Read(piece.file, piece.key, from_, lengths, Box(starts, lengths, inside).of(part), name)


def empty_like(parameter: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Memory for a tensor that is laid out as ``parameter``, if it has its shape, else for the whole of it."""
    if is_dtensor(parameter) and tuple(parameter.shape) == entry.shape:
        return torch.empty_like(parameter, dtype=entry.torch_dtype, requires_grad=False)
    return torch.empty(entry.shape, dtype=entry.torch_dtype, device=local(parameter).device)
