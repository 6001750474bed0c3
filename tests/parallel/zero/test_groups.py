"""Small blocks, and small models, are gathered together: the same numbers in fewer collectives."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lockstep.utils import has_version
from parallel.zero import grouped
from parallel.zero.grouped import BLOCK_BYTES, BLOCKS, LIMIT, MODELS, ROOT_BYTES, InOrder, sizes_of

TOLERANCE = 1e-5

shares_groups = pytest.mark.skipif(
    not has_version("torch", "2.12"), reason="with torch 2.11 each block is a group of its own"
)


@shares_groups
@pytest.mark.parametrize("kind", MODELS)
def test_neighbours_share_a_group_up_to_its_size(kind: str) -> None:
    model, expected = MODELS[kind]
    assert sizes_of(model()) == expected


@shares_groups
@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("zero=3", 2 * BLOCK_BYTES - 1, [1] * BLOCKS),
        ("zero=3", 3 * BLOCK_BYTES, [3, 2]),
        ("zero=2", LIMIT, [2, 2, 1]),
        ("zero=3 activation=full", LIMIT, [2, 2, 1]),
        # As much as the whole model, and one byte less.
        ("zero=3", BLOCKS * BLOCK_BYTES + ROOT_BYTES, []),
        ("zero=3", BLOCKS * BLOCK_BYTES + ROOT_BYTES - 1, [BLOCKS]),
        # Exactly the blocks that were named; and no more memory than was asked for.
        ("zero=3 blocks=Block", 10**9, [1] * BLOCKS),
        ("zero=3 hpz=2", 10**9, [1] * BLOCKS),
        ("zero=3 offload", 10**9, [1] * BLOCKS),
    ],
)
def test_what_is_asked_for_decides(text: str, limit: int, expected: list[int]) -> None:
    assert sizes_of(InOrder(), text, limit) == expected


def test_compiled_blocks_are_groups_of_their_own() -> None:
    model = InOrder()
    for layer in model.layers:
        layer.compile(backend="eager")
    assert sizes_of(model) == [1] * BLOCKS


@shares_groups
def test_blocks_with_batch_normalisation_are_groups_of_their_own_in_mixed_precision() -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4))
    )

    assert sizes_of(model, limit=1300, is_cast=False) == [2, 2]
    assert sizes_of(model, limit=1300, is_cast=True) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("ranks", "parallel", "accumulation"),
    [(2, "zero=3", 1), (4, "zero=3 forward_prefetch", 2)],
)
def test_grouped_blocks_train_as_in_one_process_whichever_are_called(
    run_distributed: Any, ranks: int, parallel: str, accumulation: int
) -> None:
    few = ["in any order", "branches", "frozen in part", "recomputed reentrantly"]
    kinds = list(MODELS) if parallel == "zero=3" and ranks == 2 else few
    for found in run_distributed(grouped.deviations, ranks, parallel, kinds, accumulation, timeout_s=200):
        assert {kind: off for kind, off in found.items() if not off < TOLERANCE} == {}


@shares_groups
@pytest.mark.parametrize(
    ("limit", "sizes"), [(BLOCK_BYTES, [1] * BLOCKS), (LIMIT, [2, 2, 1]), (3 * BLOCK_BYTES, [3, 2])]
)
def test_a_group_is_one_collective_and_bounds_what_is_whole(
    run_distributed: Any, limit: int, sizes: list[int]
) -> None:
    groups, everything = len(sizes) + 1, BLOCKS * BLOCK_BYTES + ROOT_BYTES
    for found in run_distributed(grouped.counted, 2, "zero=3", limit):
        assert found["evaluation"] == {"all_gather": (groups, everything / 2)}
        # The root group stays whole until backward.
        assert found["step"]["all_gather"] == (2 * groups - 1, (2 * everything - ROOT_BYTES) / 2)
        assert found["step"]["reduce_scatter"] == (groups, everything / 2)
        assert found["peak"] == ROOT_BYTES + max(sizes) * BLOCK_BYTES <= ROOT_BYTES + limit
        assert found["at rest"] == 0


def test_a_small_model_is_gathered_and_reduced_once(run_distributed: Any) -> None:
    everything = BLOCKS * BLOCK_BYTES + ROOT_BYTES
    for found in run_distributed(grouped.counted, 2, "zero=3", everything):
        assert found["step"]["all_gather"] == found["step"]["reduce_scatter"] == (1, everything / 2)
        assert (found["peak"], found["at rest"]) == (everything, 0)
