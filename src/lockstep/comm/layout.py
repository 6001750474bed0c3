"""Which elements of a tensor each rank of a mesh holds: plain arithmetic on what torch's placements say.

A placement along one mesh dimension cuts a tensor dimension as ``torch.chunk`` does. A strided one, of split factor f,
cuts it into f parts first, and each of these into the chunks; a rank holds its chunk of every part.

fully_shard describes what it cuts after a mesh dimension behind it was cut (tensor parallel) as strided too, with the
number of the later chunks as split factor. Where they divide evenly, that is the same; where not, and where the later
cut is strided itself (a fused query, key and value projection), only the order in which it cut is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

Range = tuple[int, int]
"""First index, and how many."""


class ShardRegion(NamedTuple):
    """``shape`` elements of a tensor from ``offsets`` on, which a rank has from ``inside`` on in its local part."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    inside: tuple[int, ...]

    def local_view(self, part: torch.Tensor) -> torch.Tensor:
        """Return this region of a rank's local part (of any shape), as a view."""
        return _narrowed(part, self.inside, self.shape)

    def whole_view(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this region of the whole tensor, as a view of ``shape``."""
        return _narrowed(whole, self.offsets, self.shape)


def dim_of(placement: object) -> int | None:
    """Return the tensor dimension that a placement cuts, strided or not; None where it cuts none."""
    dim: int | None = getattr(placement, "dim", None)
    return dim


def is_partial(placement: Placement) -> bool:
    """Return whether the ranks along this mesh dimension hold addends instead of elements."""
    return bool(placement.is_partial())


def whole_region(shape: Sequence[int]) -> ShardRegion:
    """Return all of a tensor, held whole."""
    zeros = (0,) * len(shape)
    return ShardRegion(zeros, tuple(shape), zeros)


def local_regions(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[object], coordinate: Sequence[int]
) -> list[ShardRegion]:
    """Return what the rank at ``coordinate`` of the mesh holds, in regions that together are its local part; none
    is empty."""
    return regions_of_ranges(local_ranges(shape, mesh_shape, placements, coordinate))


def regions_of_ranges(ranges: Sequence[list[Range]]) -> list[ShardRegion]:
    """Return the regions of a part that has these indices along each dimension, in its order."""
    return [
        ShardRegion(
            tuple(start for _, (start, _) in chosen),
            tuple(count for _, (_, count) in chosen),
            tuple(inside for inside, _ in chosen),
        )
        for chosen in product(*(_with_places(of_dim) for of_dim in ranges))
    ]


def local_shape(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[object], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of the local part of the rank at ``coordinate``."""
    ranges = local_ranges(shape, mesh_shape, placements, coordinate)
    return tuple(sum(count for _, count in of_dim) for of_dim in ranges)


def local_ranges(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[object], coordinate: Sequence[int]
) -> list[list[Range]]:
    """Return by tensor dimension the indices that the rank at ``coordinate`` holds, in the order of its local part."""
    ranges: list[list[Range]] = [[(0, size)] if size else [] for size in shape]
    for axis, factor in _in_order(mesh_shape, placements):
        dim = dim_of(placements[axis])
        if dim is not None:
            # A strided placement cuts into ``factor`` parts first, and each rank has its chunk of every one of them.
            parts = _chunks(ranges[dim], factor)
            number, index = mesh_shape[axis], coordinate[axis]
            ranges[dim] = _merge_adjacent([one for part in parts for one in _chunks(part, number)[index]])
    return ranges


def is_plain(placements: Sequence[object]) -> bool:
    """Return whether no tensor dimension is cut twice, nor strided: torch's own functions handle the rest."""
    dims = [dim for dim in map(dim_of, placements) if dim is not None]
    return len(set(dims)) == len(dims) and all(_factor(placement) == 1 for placement in placements)


def _in_order(mesh_shape: Sequence[int], placements: Sequence[object]) -> list[tuple[int, int]]:
    """Mesh dimensions in the order in which they cut, with the number of parts that are cut first."""
    order: list[tuple[int, int]] = []
    # From the last axis on: an early cut goes to the front, a late one behind all cuts of the axes after it.
    for axis in reversed(range(len(placements))):
        dim, factor = dim_of(placements[axis]), _factor(placements[axis])
        # Number of chunks into which axes behind this one cut the same dim. torch writes it as the split factor if
        # this axis was cut after them.
        later = math.prod(
            mesh_shape[other]
            for other in range(axis + 1, len(placements))
            if dim_of(placements[other]) == dim
        )
        # It was cut after those behind it: see above.
        if factor > 1 and factor == later:
            order.append((axis, 1))
        else:
            order.insert(0, (axis, factor))
    return order


def _factor(placement: object) -> int:
    return int(getattr(placement, "split_factor", 1))


def _chunks(ranges: list[Range], number: int) -> list[list[Range]]:
    """Cut the indices as ``torch.chunk`` does, with empty chunks in the end where there are too few."""
    total = sum(count for _, count in ranges)
    # Rounded up, as torch.chunk does: only the last chunk that is not empty may be shorter.
    most = -(-total // number)
    return [_cut(ranges, i * most, (i + 1) * most) for i in range(number)]


def _cut(ranges: list[Range], begin: int, end: int) -> list[Range]:
    found, place = [], 0
    for start, count in ranges:
        # ``place`` counts positions in the list of ranges, ``start`` positions in the tensor.
        first, last = max(begin, place), min(end, place + count)
        if first < last:
            found.append((start + first - place, last - first))
        place += count
    return found


def _merge_adjacent(ranges: list[Range]) -> list[Range]:
    found: list[Range] = []
    for start, count in ranges:
        # Ranges that touch are one, so that a part without strides is one region.
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + count)
        else:
            found.append((start, count))
    return found


def _with_places(ranges: list[Range]) -> Iterator[tuple[int, Range]]:
    place = 0
    for start, count in ranges:
        yield place, (start, count)
        place += count


def _narrowed(tensor: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    for dim, (start, count) in enumerate(zip(offsets, shape, strict=True)):
        if (start, count) != (0, tensor.shape[dim]):
            tensor = tensor.narrow(dim, start, count)
    return tensor
