"""Which elements of the whole a rank's tensor is: as its DTensor says, or by its shape beside that of the whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep.comm.dtensor import is_dtensor, regions_of
from lockstep.comm.layout import Range, ShardRegion, regions_of_ranges, whole_region
from lockstep.config.enums import CPMethod
from lockstep.errors import UsageError
from lockstep.runtime.mesh import DeviceMeshes


@dataclass(frozen=True)
class ShardAxes:
    """The ranks that share one batch: how many along an axis, and which of them this one is."""

    tp: tuple[int, int] = (1, 0)
    cp: tuple[int, int] = (1, 0)
    pp: int = 1
    has_head_and_tail: bool = False

    @classmethod
    def of(cls, meshes: DeviceMeshes, cp_method: CPMethod) -> ShardAxes:
        axes, is_ring = meshes.axes, cp_method is CPMethod.RING
        return cls((axes.tp, meshes.rank_on("tp")), (axes.cp, meshes.rank_on("cp")), axes.pp, is_ring)

    def cuts_positions(self, shape: tuple[int, ...], expected: tuple[int, ...] | None) -> bool:
        """Return whether a tensor of ``shape`` is this rank's positions of one of the shape that is expected."""
        size = self.cp[0]
        if size == 1 or expected is None or len(shape) != len(expected):
            return False
        # Each dimension but the last, which tensor parallelism cuts.
        pairs = list(zip(shape, expected, strict=True))
        return any(mine * size == whole for mine, whole in pairs[:-1] or pairs)


def region(
    tensor: torch.Tensor,
    expected: tuple[int, ...] | None,
    axes: ShardAxes,
    part: int = 0,
    rows: int = 1,
) -> tuple[tuple[int, ...], list[ShardRegion]] | None:
    """Shape of the whole, and the regions of it that this rank's part of ``tensor`` is; None: that cannot be told.

    Args:
        tensor: Of any shape; a DTensor, or this rank's part of a plain one.
        expected: The shape of the whole in the reference; None: it has none.
        part: Which micro-batch of a pipeline.
        rows: Of the batch, whose positions may follow one another in the first dimension: [rows * positions, ...].
    """
    if is_dtensor(tensor):
        try:
            return tuple(tensor.shape), regions_of(tensor)
        except UsageError:
            # Its values are addends, which are no elements.
            return None
    shape = tuple(tensor.shape)
    # With other dimensions it is no part of the whole: the comparison tells of its shape.
    if expected is None or shape == expected or len(shape) != len(expected):
        return shape, [whole_region(shape)]
    cut = [
        dim for dim, (mine, all_of_it) in enumerate(zip(shape, expected, strict=True)) if mine != all_of_it
    ]
    ranges: list[list[Range]] = [[(0, size)] for size in shape]
    for dim in cut:
        ranges_here = _local_ranges(shape[dim], expected[dim], dim, len(shape), axes, part, rows)
        if ranges_here is None:
            return shape, [whole_region(shape)]
        ranges[dim] = ranges_here
    return expected, regions_of_ranges(ranges)


def _local_ranges(
    mine: int, whole: int, dim: int, dims: int, axes: ShardAxes, part: int, rows: int
) -> list[Range] | None:
    """Return which ``mine`` of ``whole`` indices this rank has along a dimension, in its order; None: no axis cuts
    so."""
    is_first, is_last = dim == 0, dim == dims - 1
    # All cuts are even: a part goes into the whole without a rest.
    if not mine or whole % mine:
        return None
    parts = whole // mine
    # It is a micro-batch of a pipeline, however many there are.
    if is_first and axes.pp > 1 and part < parts:
        return [(mine * part, mine)]
    size = axes.cp[0]
    # With tp = cp a cut fits both: the last dimension is taken for features, others for positions.
    if size == parts and (not is_last or axes.tp[0] != parts):
        if is_first and mine % rows == 0:
            # Rows and positions share this dimension: each row has its own ranges.
            length = whole // rows
            return [
                (row * length + start, count)
                for row in range(rows)
                for start, count in _positions(mine // rows, axes)
            ]
        return _positions(mine, axes)
    return [(mine * axes.tp[1], mine)] if axes.tp[0] == parts else None


def _positions(mine: int, axes: ShardAxes) -> list[Range]:
    """Return which ``mine`` positions of a sequence this rank has."""
    size, rank = axes.cp
    if not axes.has_head_and_tail:
        return [(mine * rank, mine)]
    head, tail = mine - mine // 2, mine // 2
    # The heads of all ranks come first, and then their tails from the last rank to the first.
    return [(head * rank, head), (size * head + (size - 1 - rank) * tail, tail)]
