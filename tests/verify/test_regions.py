"""Which elements of the whole a rank's positions are: put back with them, the parts of all ranks are the whole."""

from __future__ import annotations

import pytest
import torch

from lockstep.verify import ShardAxes, region

ROWS, LENGTH, WIDTH = 3, 8, 5


@pytest.mark.parametrize("is_ring", [False, True], ids=["contiguous", "head and tail"])
@pytest.mark.parametrize("is_flat", [False, True], ids=["[rows, positions]", "[rows * positions]"])
def test_parts_of_a_sequence_make_the_whole(is_ring: bool, is_flat: bool) -> None:
    whole = torch.arange(ROWS * LENGTH * WIDTH).reshape(ROWS, LENGTH, WIDTH)
    # Of 8 positions, with the causal balance of ring attention: rank 0 has 0, 1, 6, 7, rank 1 has 2, 3, 4, 5.
    of_ranks = [[0, 1, 6, 7], [2, 3, 4, 5]] if is_ring else [[0, 1, 2, 3], [4, 5, 6, 7]]
    expected = whole.flatten(0, 1) if is_flat else whole
    found = torch.full_like(expected, -1)
    for rank, positions in enumerate(of_ranks):
        part = whole[:, positions].flatten(0, 1) if is_flat else whole[:, positions]
        placed = region(
            part, tuple(expected.shape), ShardAxes(cp=(2, rank), has_head_and_tail=is_ring), 0, ROWS
        )
        assert placed is not None
        shape, boxes = placed
        assert shape == tuple(expected.shape)
        for box in boxes:
            box.whole_view(found).copy_(box.local_view(part))
    assert torch.equal(found, expected)
