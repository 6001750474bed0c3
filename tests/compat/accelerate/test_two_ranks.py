"""What scripts do on several ranks with parts of Accelerate: against plain torch in one process."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Accelerator
from lockstep.errors import UsageError
from lockstep.parallelism_config import ParallelismConfig
from lockstep.utils import (
    FullyShardedDataParallelPlugin,
    GatheredParameters,
    fsdp2_load_full_state_dict,
    fsdp2_prepare_model,
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def tower() -> Tower:
    torch.manual_seed(0)
    return Tower()


def all_of_them(folder: str) -> dict[str, Any]:
    """Each case in the same two processes, one after the other."""
    rank = Accelerator(cpu=True, watch=False).process_index
    return {
        case.__name__: case(rank, Path(folder))
        for case in (gathered, filled, states_in_files, meshes, pickled)
    }


def gathered(rank: int, folder: Path) -> Any:
    accelerator = Accelerator(cpu=True, parallel="zero=3", watch=False)
    plain = tower()
    model = fsdp2_prepare_model(accelerator, copy.deepcopy(plain))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    parameters = list(model.parameters())
    with GatheredParameters(parameters):
        seen = [one.detach().clone() for one in model.parameters()]
        own = parameters[0].data.sum() + torch.cat([parameters[1], parameters[3]]).sum()
    with GatheredParameters(model.first.weight, modifier_rank=1):
        if rank == 1:
            nn.init.constant_(model.first.weight, 0.5)  # type: ignore[arg-type]
            model.first.weight.data[0, 1] = 2.0
    with torch.no_grad():
        plain.first.weight.fill_(0.5)
        plain.first.weight[0, 1] = 2.0
    x = torch.arange(20.0).reshape(4, 5)
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    plain(x).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    lost = ""
    try:
        with GatheredParameters(parameters):
            parameters[0].data.mul_(2)
    except UsageError as error:
        lost = str(error)
    after = accelerator.get_state_dict(model)
    fresh = tower()
    return {
        "read": all(torch.equal(a, b) for a, b in zip(seen, fresh.parameters(), strict=True)),
        "object": torch.allclose(
            own, fresh.first.weight.sum() + fresh.first.bias.sum() + fresh.second.bias.sum()
        ),
        "changed": all(torch.allclose(after[name], value) for name, value in plain.state_dict().items()),
        "lost": "modifier_rank" in lost,
        "again": fsdp2_prepare_model(accelerator, model) is model,
    }


def filled(rank: int, folder: Path) -> bool:
    """Whether a sharded model has the values of a state dict that rank 0 alone has."""
    accelerator = Accelerator(cpu=True, parallel="zero=3", watch=False)
    model = fsdp2_prepare_model(accelerator, tower())
    whole = {name: torch.full_like(value, 3.0) for name, value in tower().state_dict().items()}
    fsdp2_load_full_state_dict(accelerator, model, whole if rank == 0 else {})
    state = accelerator.get_state_dict(model)
    return state.keys() == whole.keys() and all(bool((value == 3).all()) for value in state.values())


def states_in_files(rank: int, folder: Path) -> Any:
    found = {}
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        plugin.set_state_dict_type(kind)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, watch=False)
        model, optimizer = accelerator.prepare(*_pair())
        accelerator.backward(model(torch.ones(2, 5)).sum())
        optimizer.step()
        place = folder / kind
        save_fsdp_model(plugin, accelerator, model, place)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, place)
        other, later = accelerator.prepare(*_pair())
        load_fsdp_model(plugin, accelerator, other, place)
        load_fsdp_optimizer(plugin, accelerator, later, other, place)
        for one, step in ((model, optimizer), (other, later)):
            step.zero_grad()
            accelerator.backward(one(torch.ones(2, 5)).square().sum())
            step.step()
        first, second = accelerator.get_state_dict(model), accelerator.get_state_dict(other)
        found[kind] = all(torch.equal(first[name], second[name]) for name in first)
        accelerator.wait_for_everyone()
    found["files"] = sorted(os.listdir(folder / "FULL_STATE_DICT")) == [
        "optimizer.bin",
        "pytorch_model_fsdp.bin",
    ]
    if rank == 0:
        merge_fsdp_weights(folder / "SHARDED_STATE_DICT" / "pytorch_model_fsdp_0", folder / "merged", False)
        merged = torch.load(folder / "merged" / "pytorch_model.bin", weights_only=True)
        whole = torch.load(folder / "FULL_STATE_DICT" / "pytorch_model_fsdp.bin", weights_only=True)
        plain, optimizer = _pair()
        plain(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        for name, value in plain.state_dict().items():
            found[name] = torch.equal(merged[name], whole[name]) and torch.allclose(whole[name], value)
    return found


def _pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = tower()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def meshes(rank: int, folder: Path) -> Any:
    split = Accelerator(cpu=True, parallel="tp=2", watch=False)
    sharded = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2), watch=False)
    mesh, tensor = sharded.torch_device_mesh, torch.ones(1)
    torch.distributed.all_reduce(tensor, group=mesh["dp_shard"].get_group())
    return (
        (split.tensor_parallel_rank, split.data_parallel_rank, split.torch_device_mesh.mesh_dim_names),
        (sharded.data_parallel_shard_rank, sharded.tensor_parallel_rank, mesh["dp_shard_cp"].size()),
        (tensor.item(), mesh.get_local_rank("dp_shard"), sharded.pipeline_parallel_rank),
        Accelerator(cpu=True, watch=False).data_parallel_rank,
    )


def pickled(rank: int, folder: Path) -> Any:
    accelerator = Accelerator(cpu=True, parallel="zero=3", watch=False)
    model = accelerator.prepare(tower())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerator.save_model(model, folder / "export", safe_serialization=False)
        accelerator.save_model(model, folder / "many", max_shard_size=150, safe_serialization=False)
        accelerator.save_state(folder / "state")
    wanted = tower().state_dict()
    one = torch.load(folder / "export" / "pytorch_model.bin", weights_only=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder / "state")
    loaded = accelerator.get_state_dict(model)
    many = tower()
    with torch.no_grad():
        many.first.weight.zero_()
    from lockstep.utils import load_checkpoint_in_model

    load_checkpoint_in_model(many, folder / "many")
    return {
        "same": [
            all(torch.equal(state[name], value) for name, value in wanted.items())
            for state in (one, loaded, many.state_dict())
        ],
        "files": sorted(os.listdir(folder / "many"))[-1],
        "warned": sum("safe_serialization=False" in str(warning.message) for warning in said),
    }


def test_on_two_ranks(run_distributed: Callable[..., list[Any]], tmp_path: Path) -> None:
    first, second = run_distributed(all_of_them, 2, str(tmp_path))
    for rank, found in enumerate((first, second)):
        assert all(found["gathered"].values()), found["gathered"]
        assert all(found["states_in_files"].values()), found["states_in_files"]
        assert found["filled"]
        assert found["meshes"] == ((rank, 0, ("tp",)), (rank, 0, 2), (2.0, rank, 0), rank)
        assert found["pickled"]["same"] == [True] * 3
        assert found["pickled"]["files"] == "pytorch_model.bin.index.json"
        assert found["pickled"]["warned"] == (2 if rank == 0 else 0)


def test_pickled_weights_do_not_lie_beside_others(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, watch=False)
    model = accelerator.prepare(tower())
    accelerator.save_model(model, tmp_path)
    with pytest.raises(UsageError):
        accelerator.save_model(model, tmp_path, safe_serialization=False)


def test_a_checkpoint_has_no_pickle(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, watch=False)
    with pytest.raises(UsageError, match="a checkpoint has no pickle"):
        accelerator.save_state(tmp_path / "state", safe_serialization=False)
