"""Adam and AdamW step on this rank's parts of sharded parameters, where that is the same as a step of DTensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import Accelerator
from lockstep.train import step_without_dispatch

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "AdamW, one by one": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False}),
    "Adam, fused, amsgrad": (torch.optim.Adam, {"lr": 1e-2, "fused": True, "amsgrad": True}),
    "AdamW, rate as a tensor": (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "foreach": False}),
}


class Seen(TorchDispatchMode):
    """Operations that were called with DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.on_dtensors: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.on_dtensors.append(str(func))
        return func(*args, **(kwargs or {}))


def losses(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(inputs), inputs.flip(1))


def trains(kind: str, parallel: str) -> tuple[list[str], list[torch.Tensor], list[torch.Tensor]]:
    """Operations on DTensors in a later step; the weights, and those of the same training in one process."""
    cls, options = KINDS[kind]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))
    whole = copy.deepcopy(plain)
    accelerator = Accelerator(cpu=True, parallel=parallel)
    model, optimizer = accelerator.prepare(plain, cls(plain.parameters(), **copy.deepcopy(options)))
    reference = cls(whole.parameters(), **copy.deepcopy(options))
    seen = Seen()
    for step in range(4):
        inputs = torch.randn(4 * accelerator.num_processes, 6)
        losses(whole, inputs).backward()
        reference.step()
        reference.zero_grad()
        accelerator.backward(
            losses(model, inputs.chunk(accelerator.num_processes)[accelerator.process_index])
        )
        if step == 3:
            with seen:
                optimizer.optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        optimizer.optimizer.load_state_dict(copy.deepcopy(optimizer.optimizer.state_dict()))
    assert all(
        isinstance(value, DTensor)
        for state in optimizer.optimizer.state.values()
        for value in state.values()
        if value.ndim
    )
    weights = accelerator.get_state_dict(model)
    return seen.on_dtensors, list(weights.values()), list(whole.state_dict().values())


@pytest.mark.parametrize("parallel", ["zero=3", "zero=2 replicate=2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_shards_calls_nothing_on_dtensors(run_distributed: Any, kind: str, parallel: str) -> None:
    for on_dtensors, weights, expected in run_distributed(trains, 4, kind, parallel):
        # Gradients are reduced before a step, state is made in the first one.
        assert on_dtensors == []
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def other_layouts() -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Gradients that are terms of a sum, or sharded along another dimension, beside those that are laid out alike."""
    dist.init_process_group("gloo")
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    found = []
    for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(0)]):
        torch.manual_seed(0)
        values, gradients = torch.randn(2, 4, 4), torch.randn(2, 2, 4, 4)
        plain = [nn.Parameter(value.clone()) for value in values]
        spread: list[Any] = [
            nn.Parameter(distribute_tensor(value, mesh, [place]))
            for value, place in zip(values, placements, strict=True)
        ]
        of_plain, of_spread = (torch.optim.AdamW(one, lr=0.1, foreach=False) for one in (plain, spread))
        step_without_dispatch(of_spread)
        for terms in gradients:
            plain[0].grad, plain[1].grad = terms[0] * 3, terms[1]
            if isinstance(placements[0], Replicate):
                spread[0].grad = DTensor.from_local(terms[0] * (1 + rank), mesh, [Partial()])
            else:
                spread[0].grad = distribute_tensor(terms[0] * 3, mesh, [Shard(1)])
            spread[1].grad = distribute_tensor(terms[1], mesh, [Shard(0)])
            of_plain.step()
            of_spread.step()
        found.append(([one.full_tensor().detach() for one in spread], [one.detach() for one in plain]))
    return found


def test_gradients_in_another_layout_are_left_to_dtensor(run_distributed: Any) -> None:
    for rank in run_distributed(other_layouts, 2):
        for spread, plain in rank:
            for ours, theirs in zip(spread, plain, strict=True):
                torch.testing.assert_close(ours, theirs)


def test_a_copy_of_an_optimizer_steps_its_own_parameters() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    step_without_dispatch(optimizer)
    other = copy.deepcopy(optimizer)
    (copied,) = other.param_groups[0]["params"]
    copied.grad = torch.ones(3)
    other.step()
    assert parameter.equal(torch.ones(3)) and not copied.equal(torch.ones(3))
