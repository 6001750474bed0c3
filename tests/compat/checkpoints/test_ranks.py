"""A file of each rank, as ``torch.save(model.state_dict())`` writes it under FSDP2, is put together with the others.

Torch places the shards: FSDP2 itself on a process group that does not communicate, as the rank that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, debug, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep.compat.checkpoints import read_foreign
from lockstep.errors import CheckpointError
from tests.refusals import expect_refusal


def whole_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))


def saved_as(
    folder: Path,
    ranks: int,
    state: Callable[[int], Any],
    name: str = "rank-{}.pt",
    only: tuple[int, ...] = (),
) -> Path:
    """Let each of ``ranks`` in turn write the state that it has."""
    for rank in only or range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            torch.save(state(rank), folder / name.format(rank))
        finally:
            dist.destroy_process_group()
            # It compares meshes without the rank, and would give the next one the coordinate of this one.
            for clear in ("_clear_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
                getattr(debug, clear, lambda: None)()
    return folder


def flat(_: int) -> Any:
    return fully_shard(whole_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),))).state_dict()


def replicated(_: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(whole_model(), mesh=mesh).state_dict()


def split(_: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model = parallelize_module(whole_model(), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["shard"]).state_dict()


def placed(_: int) -> Any:
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2))
    pairs = ([Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(0), Replicate()], [Shard(0), Shard(0)])
    state = whole_model().state_dict()
    return {
        name: distribute_tensor(value, mesh, pair[:1] * 2 if value.ndim < 2 else pair, src_data_rank=None)
        for (name, value), pair in zip(state.items(), pairs, strict=True)
    }


@pytest.mark.parametrize(
    ("ranks", "state"), [(1, flat), (2, flat), (3, flat), (4, flat), (4, replicated), (4, placed)]
)
def test_shards_of_all_ranks_become_whole_tensors(
    ranks: int, state: Callable[[int], Any], tmp_path: Path
) -> None:
    found = read_foreign(saved_as(tmp_path, ranks, state))
    expected = whole_model().state_dict()
    assert found.models[0].keys() == expected.keys() and found.weights_only
    assert all(torch.equal(found.models[0][name], value) for name, value in expected.items())


def test_tensor_parallel_comes_before_fsdp_where_both_cut_the_same_rows(tmp_path: Path) -> None:
    seen: list[str] = []

    def state(rank: int) -> Any:
        shards = split(rank)
        # Nothing is communicated here, so each tensor rank fills in what it would have received.
        for name, value in whole_model().state_dict().items():
            shards[name] = distribute_tensor(
                value, shards[name].device_mesh, shards[name].placements, src_data_rank=None
            )
        seen.extend(str(value.placements) for value in shards.values())
        return shards

    found = read_foreign(saved_as(tmp_path, 4, state))
    assert any("_StridedShard" in placements or "_S(" in placements for placements in seen)
    for name, value in whole_model().state_dict().items():
        assert torch.equal(found.models[0][name], value), name


def test_files_of_each_part_of_the_state_are_read_together(tmp_path: Path) -> None:
    saved_as(tmp_path, 2, flat, "model_world_size_2_rank_{}.pt")
    saved_as(
        tmp_path, 2, lambda rank: {"lr_scheduler": {"last_epoch": 3}}, "extra_state_world_size_2_rank_{}.pt"
    )
    found = read_foreign(tmp_path)
    assert torch.equal(found.models[0]["0.weight"], whole_model()[0].weight)
    assert found.other == {"extra": {"lr_scheduler": {"last_epoch": 3}}}


def test_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = saved_as(tmp_path, 3, flat, only=(0, 2))
    expect_refusal(CheckpointError, "1 of 3 ranks, and 2 of their files", read_foreign, folder)
    expect_refusal(CheckpointError, "1 of 3 ranks, and 1 of their files", read_foreign, folder / "rank-2.pt")


def test_ranks_with_other_names_or_other_plain_tensors_are_refused(tmp_path: Path) -> None:
    def stages(rank: int) -> Any:
        return {f"stage{rank}.{name}": value for name, value in flat(rank).items()}

    def experts(rank: int) -> Any:
        return {**flat(rank), "expert": torch.full((2,), float(rank))}

    for name, state, said in (("a", stages, "in the entries"), ("b", experts, "no DTensor")):
        (tmp_path / name).mkdir()
        folder = saved_as(tmp_path / name, 2, state)
        expect_refusal(CheckpointError, said, read_foreign, folder)


def test_numbered_files_without_dtensors_are_not_put_together(tmp_path: Path) -> None:
    saved_as(tmp_path, 2, lambda rank: {"weight": torch.full((2,), float(rank))})
    expect_refusal(CheckpointError, "no DTensors", read_foreign, tmp_path)
    assert read_foreign(tmp_path / "rank-1.pt").models[0]["weight"].tolist() == [1.0, 1.0]


def test_sums_that_are_still_to_be_made_are_refused(tmp_path: Path) -> None:
    def partial(_: int) -> Any:
        from torch.distributed.tensor import DTensor, Partial

        mesh = init_device_mesh("cpu", (2,))
        return {"weight": DTensor.from_local(torch.ones(2), mesh, [Partial()])}

    with pytest.raises(CheckpointError, match=r"\['weight'\] is no DTensor"):
        read_foreign(saved_as(tmp_path, 2, partial))


@pytest.mark.parametrize("coordinate", [(-1,), (2**50,), ("a",), None, ()], ids=str)
def test_an_impossible_place_of_a_shard_is_refused(coordinate: Any, tmp_path: Path) -> None:
    def state(_: int) -> Any:
        model = fully_shard(whole_model(), mesh=DeviceMesh("cpu", [0]))
        found = dict(model.named_parameters())
        for value in found.values():
            value.device_mesh._coordinate_on_dim = coordinate
        return found

    expect_refusal(CheckpointError, "damaged", read_foreign, saved_as(tmp_path, 1, state) / "rank-0.pt")
