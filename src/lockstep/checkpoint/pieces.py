"""Which pieces of saved tensors a rank reads, and where they belong in what it holds.

Reading takes from every piece what lies in the own boxes, whatever the layout that was saved.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from lockstep.checkpoint.format.index import ChunkMetadata, Index, TensorEntry
from lockstep.comm.dtensor import boxes_of, is_dtensor, local
from lockstep.comm.layout import ShardRegion
from lockstep.errors import CheckpointError


@dataclass(frozen=True)
class ReadItem:
    """Copy ``lengths`` elements from ``offsets`` on of ``key`` in ``file`` into ``into``, a view of this shape."""

    file: str
    key: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    into: torch.Tensor
    name: str


def reads(places: Mapping[str, torch.Tensor], index: Index) -> list[ReadItem]:
    """What must be read to fill ``places``, whole tensors or DTensors of which each rank holds its part.

    Raises:
        CheckpointError: a tensor is not in the checkpoint or has another shape.
    """
    return reads_as({name: (name, place) for name, place in places.items()}, index)


def reads_as(places: Mapping[str, tuple[str, torch.Tensor]], index: Index) -> list[ReadItem]:
    """As ``reads``, of places that are known by other names than the tensors, which stand first in the pairs."""
    found: list[ReadItem] = []
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

    def near(self, box: ShardRegion) -> Iterator[ChunkMetadata]:
        """All pieces that may share elements with the box."""
        if self._dim is None:
            yield from self._pieces
            return
        start = box.offsets[self._dim]
        first = bisect_right(self._starts, start - self._longest)
        last = bisect_left(self._starts, start + box.shape[self._dim])
        yield from self._pieces[first:last]


def _read_of(piece: ChunkMetadata, box: ShardRegion, part: torch.Tensor, name: str) -> ReadItem | None:
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
    return ReadItem(
        piece.file, piece.key, from_, lengths, ShardRegion(starts, lengths, inside).of(part), name
    )


def empty_like(parameter: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Memory for a tensor that is laid out as ``parameter``, if it has its shape, else for the whole of it."""
    if is_dtensor(parameter) and tuple(parameter.shape) == entry.shape:
        return torch.empty_like(parameter, dtype=entry.torch_dtype, requires_grad=False)
    return torch.empty(entry.shape, dtype=entry.torch_dtype, device=local(parameter).device)
