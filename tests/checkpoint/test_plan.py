"""Who writes what: every element once, replicated tensors shared out evenly, and no plan made twice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lockstep import Accelerator
from lockstep.checkpoint import (
    CheckpointGroup,
    SavePlan,
    SavePlanner,
    create_read_items,
)
from lockstep.comm import CommCounter, Communicator
from lockstep.errors import CheckpointError
from tests.patching import module_of
from tests.refusals import expect_refusal


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape).to(dtype)


def replicated() -> dict[str, torch.Tensor]:
    sizes = [1, 300, 7, 50, 1000, 20, 400, 0, 3, 90, 650]
    found = {f"model.{i % 2}.w{i}": numbered(size) for i, size in enumerate(sizes)}
    return {**found, "object.0.big": numbered(30, 10, dtype=torch.float64), "scalar": torch.tensor(1.5)}


def exchanged(planner: SavePlanner, tensors: dict[str, torch.Tensor], communicator: Communicator) -> SavePlan:
    """The plan that ranks make of what they tell each other."""
    signatures = communicator.gather_object([planner.signature(tensors)])
    if planner.is_outdated(signatures):
        local_plans = communicator.gather_object([planner.create_local_plan(tensors)])
        planner.create_global_plan(local_plans, signatures)
    return planner.plan


def planned() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    planner = SavePlanner(CheckpointGroup(rank, list(range(world))))
    with CommCounter() as first:
        plan = exchanged(planner, replicated(), accelerator._communicator)
    with CommCounter() as second:
        again = exchanged(planner, replicated(), accelerator._communicator)
    return {
        "pieces": {name: [(p.file, p.key) for p in entry.pieces] for name, entry in plan.index.items()},
        "mine": {(file, key) for file, keys in plan.mine.items() for key in keys},
        "reused": again is plan,
        "collectives": (len(first.records), len(second.records)),
    }


def test_ranks_write_their_own_files_and_about_as_many_bytes_and_use_a_plan_again(
    run_distributed: Any,
) -> None:
    found = run_distributed(planned, 4)
    sizes = {name: t.numel() * t.element_size() for name, t in replicated().items()}
    written = [0] * 4
    for name, [(file, key)] in found[0]["pieces"].items():
        group, number = file.removesuffix(".safetensors").split("-")
        assert group == {"model.0": "model", "model.1": "model_1"}.get(name.rpartition(".")[0], "state")
        assert [(file, key) in other["mine"] for other in found] == [int(number) == rank for rank in range(4)]
        assert key == (name.split(".", 2)[2] if name.startswith("model") else name)
        written[int(number)] += sizes[name]
    assert sum(written) == sum(sizes.values())
    assert max(written) - min(written) <= max(sizes.values())
    for other in found:
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
