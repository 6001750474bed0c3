"""Ranks of a mesh without processes: what torch's own placements cut, and stand-ins for DTensors that hold it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

Coordinate = tuple[int, ...]


def chunks(tensor: torch.Tensor, number: int, dim: int) -> list[torch.Tensor]:
    """``torch.chunk``, with empty ones in the end."""
    found = list(torch.chunk(tensor, number, dim=dim))
    return found + [tensor.narrow(dim, 0, 0)] * (number - len(found))


def cut(tensor: torch.Tensor, mesh: Coordinate, placements: Sequence[Any], at: Coordinate) -> torch.Tensor:
    """The part at this coordinate, as torch's placements split it one after the other."""
    for size, placement, index in zip(mesh, placements, at, strict=True):
        if not placement.is_replicate():
            tensor = placement._split_tensor(tensor, size, with_padding=False)[0][index]
    return tensor


def cut_by_fully_shard(
    tensor: torch.Tensor, mesh: Coordinate, behind: Sequence[Any], dim: int, at: Coordinate
) -> torch.Tensor:
    """As ``fully_shard`` chunks the parts that the placements ``behind`` the first mesh dimension have made."""
    return chunks(cut(tensor, mesh[1:], behind, at[1:]), mesh[0], dim)[at[0]]


def described_by_fully_shard(mesh: Coordinate, behind: Sequence[Any], dim: int) -> list[Any]:
    """What it calls that: strided by the number of shards behind it along the same dimension."""
    there = (size for size, p in zip(mesh[1:], behind, strict=True) if getattr(p, "dim", None) == dim)
    factor = math.prod(there)
    return [_StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim), *behind]


class Mesh:
    """A mesh seen from one of its ranks."""

    def __init__(self, shape: Coordinate, at: Coordinate) -> None:
        self.shape = shape
        self._at = at

    def get_coordinate(self) -> Coordinate:
        return self._at


class Spread:
    """What of DTensor says which part of a tensor a rank holds."""

    def __init__(
        self,
        part: torch.Tensor,
        shape: Coordinate,
        mesh: Coordinate,
        placements: Sequence[Any],
        at: Coordinate,
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = part.dtype
        self._mesh = Mesh(mesh, at)
        self._placements = tuple(placements)
        self._part = part

    @property
    def device_mesh(self) -> Mesh:
        return self._mesh

    @property
    def placements(self) -> tuple[Any, ...]:
        return self._placements

    def numel(self) -> int:
        return self.shape.numel()

    def to_local(self) -> torch.Tensor:
        return self._part


def coordinates(mesh: Coordinate) -> list[Coordinate]:
    return list(product(*map(range, mesh)))


def is_order_of_its_own(mesh: Coordinate, placements: Sequence[Any]) -> bool:
    """Whether a strided placement reads as one of ``fully_shard``, which cuts after those behind it."""
    for axis, placement in enumerate(placements):
        dim = getattr(placement, "dim", None)
        behind = zip(mesh[axis + 1 :], placements[axis + 1 :], strict=True)
        factor = math.prod(size for size, other in behind if getattr(other, "dim", None) == dim)
        if isinstance(placement, _StridedShard) and placement.split_factor == factor:
            return True
    return False
