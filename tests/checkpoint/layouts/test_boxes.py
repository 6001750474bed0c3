"""Who holds which elements: compared with torch's own splitting, for any placements on any mesh, without processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from checkpoint.layouts import simulated
from checkpoint.layouts.simulated import Coordinate, Spread, coordinates
from lockstep.checkpoint import CheckpointGroup, SavePlanner
from lockstep.comm import local_regions, local_shape, regions_of
from lockstep.errors import CheckpointError, UsageError
from tests.marks import examples
from tests.refusals import expect_refusal

MESHES = st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3), (4, 2), (2, 1, 3), (2, 2, 2)])
SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


def numbered(shape: Coordinate) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape)


@st.composite
def placements(draw: Any, dims: int, count: int) -> list[Any]:
    def one() -> Any:
        kind, dim = draw(st.sampled_from("rsssf")), draw(st.integers(0, dims - 1))
        if kind == "r":
            return Replicate()
        return Shard(dim) if kind == "s" else _StridedShard(dim, split_factor=draw(st.integers(2, 3)))

    return [one() for _ in range(count)]


@st.composite
def spreads(draw: Any, shape: Coordinate, values: torch.Tensor) -> list[Spread]:
    """One tensor on the ranks of a mesh: as torch distributes it, or as fully_shard cuts what was distributed."""
    mesh = draw(MESHES)
    if len(mesh) > 1 and draw(st.booleans()):
        behind = draw(placements(len(shape), len(mesh) - 1))
        assume(not simulated.is_order_of_its_own(mesh[1:], behind))
        dim = draw(st.integers(0, len(shape) - 1))
        said = simulated.described_by_fully_shard(mesh, behind, dim)
        parts = {at: simulated.cut_by_fully_shard(values, mesh, behind, dim, at) for at in coordinates(mesh)}
        # Two cuts in a row have no order in what fully_shard says, unless it is strided.
        assume(
            said[0] != Shard(dim)
            or all(getattr(p, "dim", None) != dim or n == 1 for n, p in zip(mesh[1:], behind, strict=True))
        )
    else:
        said = draw(placements(len(shape), len(mesh)))
        assume(not simulated.is_order_of_its_own(mesh, said))
        parts = {at: simulated.cut(values, mesh, said, at) for at in coordinates(mesh)}
    return [Spread(part.clone(), shape, mesh, said, at) for at, part in parts.items()]


@st.composite
def a_spread(draw: Any) -> tuple[torch.Tensor, list[Spread]]:
    values = numbered(shape := draw(SHAPES))
    return values, draw(spreads(shape, values))


@given(a_spread())
@examples(150)
def test_boxes_are_what_torch_cuts(drawn: tuple[torch.Tensor, list[Spread]]) -> None:
    values, spread = drawn
    for one in spread:
        part = torch.full_like(one.to_local(), -1)
        for region in regions_of(one):  # type: ignore[arg-type]
            assert math.prod(region.shape) > 0
            assert bool((region.local_view(part) == -1).all())  # none overlap
            region.local_view(part).copy_(region.whole_view(values))
        assert torch.equal(part, one.to_local()), one.placements


def test_a_fused_projection_is_cut_within_each_of_its_parts() -> None:
    found = local_regions((12,), (2,), [_StridedShard(0, split_factor=3)], (1,))
    assert [(region.offsets, region.shape, region.inside) for region in found] == [
        ((2,), (2,), (0,)),
        ((6,), (2,), (2,)),
        ((10,), (2,), (4,)),
    ]
    # fully_shard halves the six rows that a rank has of it: [2, 3, 6] and [7, 10, 11].
    found = local_regions(
        (12,), (2, 2), [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)], (1, 1)
    )
    assert [(region.offsets[0], region.shape[0]) for region in found] == [(7, 1), (10, 2)]


def test_a_part_that_is_not_what_its_placements_say_is_refused() -> None:
    assert local_shape((5, 2), (2,), [Shard(0)], (1,)) == (2, 2)
    wrong: Any = Spread(numbered((3, 2)), (5, 2), (2,), [Shard(0)], (1,))
    with pytest.raises(UsageError, match=r"\(2, 2\).*\(3, 2\)"):
        regions_of(wrong)
    addend: Any = Spread(numbered((5, 2)), (5, 2), (2,), [Partial()], (1,))
    expect_refusal(UsageError, "term of a sum", regions_of, addend)


def test_ranks_that_together_lack_a_part_are_refused() -> None:
    values = numbered((6,))
    spread = [Spread(simulated.cut(values, (2,), [Shard(0)], (0,)), (6,), (2,), [Shard(0)], (0,))] * 2
    planners = [SavePlanner(CheckpointGroup(rank, [0, 1])) for rank in range(2)]
    plans = [planner.create_local_plan({"t": one}) for planner, one in zip(planners, spread, strict=True)]  # type: ignore[dict-item]
    expect_refusal(CheckpointError, "3 elements", planners[0].create_global_plan, plans)
