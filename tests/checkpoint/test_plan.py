"""Who writes what: every element once, replicated tensors shared out evenly, and no plan made twice."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lockstep import Accelerator
from lockstep.checkpoint import (
    CheckpointGroup,
    SavePlan,
    SavePlanner,
    create_read_items,
    group_of,
)
from lockstep.comm import CommCounter, Communicator, local
from lockstep.errors import CheckpointError, UsageError
from tests.patching import module_of
from tests.refusals import expect_refusal


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape).to(dtype)


def replicated() -> dict[str, torch.Tensor]:
    sizes = [1, 300, 7, 50, 1000, 20, 400, 0, 3, 90, 650]
    found = {f"model.{i % 2}.w{i}": numbered(size) for i, size in enumerate(sizes)}
    return {**found, "object.0.big": numbered(30, 10, dtype=torch.float64), "scalar": torch.tensor(1.5)}


def sharded(accelerator: Accelerator) -> dict[str, torch.Tensor]:
    """Over all ranks, and where there are 4, over half of them; also with fewer rows than ranks."""
    world = accelerator.num_processes
    line = init_device_mesh("cpu", (world,))
    found: dict[str, Any] = {
        "model.0.rows": distribute_tensor(numbered(7, 3), line, [Shard(0)]),
        "model.0.columns": distribute_tensor(numbered(2, 9), line, [Shard(1)]),
        "model.0.few": distribute_tensor(numbered(1, 4), line, [Shard(0)]),
        "model.0.everywhere": distribute_tensor(numbered(5), line, [Replicate()]),
        "optimizer.0.half": distribute_tensor(numbered(6, 2).bfloat16(), line, [Shard(0)]),
    }
    if world == 4:
        grid = init_device_mesh("cpu", (2, 2))
        found["model.1.hybrid"] = distribute_tensor(numbered(5, 2), grid, [Replicate(), Shard(0)])
        found["model.1.both"] = distribute_tensor(numbered(4, 6), grid, [Shard(0), Shard(1)])
    return found


def exchanged(planner: SavePlanner, tensors: dict[str, torch.Tensor], communicator: Communicator) -> SavePlan:
    """The plan that ranks make of what they tell each other."""
    signatures = communicator.gather_object([planner.signature(tensors)])
    if planner.is_outdated(signatures):
        local_plans = communicator.gather_object([planner.create_local_plan(tensors)])
        planner.create_global_plan(local_plans, signatures)
    return planner.plan


def planned(kind: str) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    tensors = replicated() | (sharded(accelerator) if kind == "sharded" else {})
    if kind == "own":
        tensors[f"rank.{rank}.x"] = numbered(10 + rank)
    planner = SavePlanner(CheckpointGroup(rank, list(range(world))))
    with CommCounter() as first:
        plan = exchanged(planner, tensors, accelerator._communicator)
    with CommCounter() as second:
        again = exchanged(planner, dict(tensors), accelerator._communicator)
    index = {name: (e.dtype, e.shape, [p.model_dump() for p in e.pieces]) for name, e in plan.index.items()}
    # What this rank says it writes, piece by piece, from the elements that it holds.
    mine = {
        (file, key): local(tensors[name]).reshape(-1).tolist()
        for file, keys in plan.mine.items()
        for key, name in keys.items()
    }
    wholes = {n: (t.full_tensor() if isinstance(t, DTensor) else t) for n, t in tensors.items()}
    return {
        "index": index,
        "mine": mine,
        "wholes": wholes,
        "reused": again is plan,
        "collectives": (len(first.records), len(second.records)),
        "names": sorted(tensors),
    }


@pytest.mark.parametrize(
    ("world_size", "kind"),
    [(1, "own"), (2, "replicated"), (4, "sharded"), (4, "own")],
)
def test_every_element_is_written_exactly_once(run_distributed: Any, world_size: int, kind: str) -> None:
    found = run_distributed(planned, world_size, kind)
    index = found[0]["index"]
    assert all(other["index"] == index for other in found)
    written = Counter(place for other in found for place in other["mine"])
    assert set(written.values()) == {1}
    assert set(written) == {(p["file"], p["key"]) for _, _, pieces in index.values() for p in pieces}
    elements = {place: values for other in found for place, values in other["mine"].items()}
    wholes: dict[str, torch.Tensor] = {}
    for other in found:
        wholes |= other["wholes"]
    assert sorted(index) == sorted(wholes)
    for name, (_, shape, pieces) in index.items():
        assert shape == tuple(wholes[name].shape)
        rebuilt = torch.full(shape, -1, dtype=wholes[name].dtype)
        for piece in pieces:
            values = torch.tensor(elements[piece["file"], piece["key"]], dtype=rebuilt.dtype)
            place = tuple(slice(o, o + n) for o, n in zip(piece["offsets"], piece["shape"], strict=True))
            assert bool((rebuilt[place] == -1).all()), f"{name} is written twice"
            rebuilt[place] = values.view(piece["shape"])
        assert torch.equal(rebuilt, wholes[name]), name


@pytest.mark.parametrize("world_size", [4])
def test_ranks_write_their_own_files_and_about_as_many_bytes(run_distributed: Any, world_size: int) -> None:
    found = run_distributed(planned, world_size, "replicated")
    sizes = {name: t.numel() * t.element_size() for name, t in replicated().items()}
    written = [0] * world_size
    for name, (_, _, pieces) in found[0]["index"].items():
        (piece,) = pieces
        group, number = piece["file"].removesuffix(".safetensors").split("-")
        assert group == {"model.0": "model", "model.1": "model_1"}.get(name.rpartition(".")[0], "state")
        assert (piece["file"], piece["key"]) in found[int(number)]["mine"]
        assert piece["key"] == (name.split(".", 2)[2] if name.startswith("model") else name)
        written[int(number)] += sizes[name]
    assert sum(written) == sum(sizes.values())
    assert max(written) - min(written) <= max(sizes.values())


@pytest.mark.parametrize("world_size", [2])
def test_a_plan_for_what_looks_alike_is_used_again(run_distributed: Any, world_size: int) -> None:
    for other in run_distributed(planned, world_size, "sharded"):
        first, second = other["collectives"]
        assert other["reused"]
        assert 0 < second <= first / 2


def changes() -> list[str]:
    """The kinds of a change after which a plan is made anew. On rank 1 alone in the end."""
    accelerator = Accelerator(cpu=True)
    rank, ranks = accelerator.process_index, list(range(accelerator.num_processes))
    planner = SavePlanner(CheckpointGroup(rank, ranks))
    tensors: dict[str, torch.Tensor] = {"a": numbered(4), "b": numbered(2, 2)}
    plan = exchanged(planner, tensors, accelerator._communicator)
    anew = []
    alike = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for kind, changed in {
        "values": alike,
        "shape": {**tensors, "a": numbered(5)},
        "dtype": {**tensors, "a": numbered(4).double()},
        "name": {"a": tensors["a"], "c": tensors["b"]},
        "more": {**tensors, "c": numbered(1)},
        "one rank": {**tensors, **({"rank.1.x": numbered(3)} if rank == 1 else {})},
    }.items():
        last, plan = plan, exchanged(planner, changed, accelerator._communicator)
        if plan is not last:
            anew.append(kind)
            assert set(plan.index) == set(changed) | ({"rank.1.x"} if kind == "one rank" else set())
    return anew


def test_a_plan_for_what_looks_otherwise_on_any_rank_is_made_anew(run_distributed: Any) -> None:
    assert run_distributed(changes, 2) == [["shape", "dtype", "name", "more", "one rank"]] * 2


def alone(tensors: dict[str, torch.Tensor]) -> SavePlan:
    planner = SavePlanner(CheckpointGroup(0, [0]))
    return planner.create_global_plan([planner.create_local_plan(tensors)])


def test_large_files_are_parted_between_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of(SavePlanner), "SMALLEST_PART_BYTES", 100)
    tensors = {f"model.0.w{i}": numbered(10 + i) for i in range(8)} | {"model.0.big": numbered(1000)}
    total = sum(t.nbytes for t in tensors.values())
    plan = alone(tensors)
    assert len(plan.mine) > 1
    assert list(plan.mine) == [f"model-00000-{i:03d}.safetensors" for i in range(len(plan.mine))]
    for names in plan.mine.values():
        assert len(names) == 1 or sum(tensors[name].nbytes for name in names.values()) <= total // 4
    assert sorted(name for names in plan.mine.values() for name in names.values()) == sorted(tensors)


def test_a_dtype_that_files_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"torch\.complex128"):
        alone({"object.0.c": torch.ones(2, dtype=torch.complex128)})


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.0.weight", "model"),
        ("model.1.weight", "model_1"),
        ("model.12.0.weight", "model_12"),
        ("optimizer.0.state.0.model.1.x", "state"),
        ("object.0.model.1.x", "state"),
        ("rank.0.rng.torch", "state"),
    ],
)
def test_models_have_files_of_their_own(name: str, group: str) -> None:
    assert group_of(name) == group


def test_what_is_not_there_or_has_another_shape_cannot_be_read() -> None:
    index = alone({"a": numbered(2, 3)}).index
    expect_refusal(CheckpointError, "no tensor b", create_read_items, {"b": numbered(1)}, index)
    expect_refusal(
        CheckpointError,
        "(2, 3) in the checkpoint",
        create_read_items,
        {"a": numbered(3, 2)},
        index,
    )


def disagreeing() -> str:
    """Rank 0 has the whole tensor, rank 1 a part of it."""
    accelerator = Accelerator(cpu=True)
    mesh = init_device_mesh("cpu", (2,))
    part: Any = DTensor.from_local(numbered(2), mesh, [Shard(0)], run_check=False)
    tensors = {"a": numbered(4) if accelerator.process_index == 0 else part}
    try:
        planner = SavePlanner(CheckpointGroup(accelerator.process_index, [0, 1]))
        exchanged(planner, tensors, accelerator._communicator)
    except CheckpointError as error:
        return str(error)
    return ""


def test_ranks_that_hold_different_tensors_under_one_name_are_refused(run_distributed: Any) -> None:
    for message in run_distributed(disagreeing, 2):
        assert "different tensors under one name" in message
