"""Optimizer states are found again by the names of their parameters, however these are grouped or numbered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoint import saved_files
from lockstep import Accelerator
from lockstep.errors import CheckpointError
from tests.refusals import expect_refusal


def make_model(names: tuple[str, ...] = ("a", "b", "c")) -> nn.Module:
    """Layers of different sizes under these names, always with the same weights."""
    torch.manual_seed(0)
    model = nn.Module()
    for i, name in enumerate(names):
        model.add_module(name, nn.Linear(2, 2 + i))
    return model


def step(model: nn.Module, optimizer: Any) -> None:
    """One step with gradients that differ by parameter, from their shapes alone."""
    for parameter in model.parameters():
        parameter.grad = torch.linspace(-1, 1, parameter.numel()).view_as(parameter) * (1 + parameter.numel())
    optimizer.step()
    optimizer.zero_grad()


def moments(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """In the order of the model's parameters."""
    return [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]


def run(model: nn.Module, groups: Any) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True)
    _, optimizer = accelerator.prepare(model, torch.optim.Adam(groups, lr=0.1))
    return accelerator, optimizer


def test_the_file_names_moments_by_parameter(tmp_path: Path) -> None:
    model = make_model()
    accelerator, optimizer = run(model, [{"params": [model.c.weight]}, {"params": [model.a.bias], "lr": 0.5}])
    step(model, optimizer)
    accelerator.save_state(tmp_path / "s")
    tensors = saved_files.tensors(tmp_path / "s")
    for name, parameter in (("c.weight", model.c.weight), ("a.bias", model.a.bias)):
        expected = optimizer.state[parameter]["exp_avg_sq"]
        assert torch.equal(tensors[f"optimizer.0.state.0.{name}.exp_avg_sq"], expected)


def saved_and_loaded(
    tmp_path: Path, saves: nn.Module, saved_groups: Any, loads: nn.Module, groups: Any
) -> Any:
    """Save after one step of ``saves``, load into the other; returns both optimizers."""
    accelerator, before = run(saves, saved_groups)
    step(saves, before)
    accelerator.save_state(tmp_path / "s")
    other, after = run(loads, groups)
    other.load_state(tmp_path / "s")
    return before, after


def test_groups_in_another_order_inside_get_the_moments_of_their_parameters(tmp_path: Path) -> None:
    saves, loads = make_model(), make_model()
    before, after = saved_and_loaded(
        tmp_path, saves, list(saves.parameters()), loads, list(loads.parameters())[::-1]
    )
    for mine, theirs in zip(moments(loads, after), moments(saves, before), strict=True):
        assert torch.equal(mine, theirs)
    step(saves, before)
    step(loads, after)
    for mine, theirs in zip(loads.parameters(), saves.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_groups_keep_their_own_settings(tmp_path: Path) -> None:
    saves, loads = make_model(), make_model()
    groups = [
        {"params": saves.a.parameters(), "lr": 0.25},
        {"params": saves.b.parameters(), "betas": (0.5, 0.7)},
    ]
    _, after = saved_and_loaded(
        tmp_path,
        saves,
        groups,
        loads,
        [{"params": loads.a.parameters()}, {"params": loads.b.parameters()}],
    )
    assert [group["lr"] for group in after.param_groups] == [0.25, 0.1]
    assert [group["betas"] for group in after.param_groups] == [(0.9, 0.999), (0.5, 0.7)]


def test_parameters_of_no_model_are_found_by_their_place(tmp_path: Path) -> None:
    """An optimizer over what no prepared model has: both runs know it by number alone."""
    saves, loads = make_model(), make_model()
    results = []
    for model, load in ((saves, False), (loads, True)):
        accelerator = Accelerator(cpu=True)
        optimizer = accelerator.prepare(torch.optim.Adam(model.parameters(), lr=0.1))
        if load:
            accelerator.load_state(tmp_path / "s")
        else:
            step(model, optimizer)
            accelerator.save_state(tmp_path / "s")
        results.append(moments(model, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    names = {name for name in saved_files.tensors(tmp_path / "s") if name.endswith("exp_avg")}
    assert names == {f"optimizer.0.state.#{i}.exp_avg" for i in range(6)}


@pytest.mark.parametrize("parts", [[6], [1, 5], [2, 2, 2], [2, 3]])
def test_other_groups_are_refused_and_change_nothing(tmp_path: Path, parts: list[int]) -> None:
    saves, loads = make_model(), make_model()
    accelerator, before = run(
        saves, [{"params": list(saves.parameters())[:4]}, {"params": saves.c.parameters()}]
    )
    step(saves, before)
    accelerator.save_state(tmp_path / "s")
    rest = list(loads.parameters())
    groups = [{"params": [rest.pop(0) for _ in range(part)]} for part in parts]
    other, after = run(loads, groups)
    step(loads, after)
    step(loads, after)
    kept = [p.detach().clone() for p in loads.parameters()], dict(after.state_dict()["state"])
    expect_refusal(CheckpointError, "[4, 2]", other.load_state, tmp_path / "s")
    assert all(torch.equal(p, k) for p, k in zip(loads.parameters(), kept[0], strict=True))
    assert {id(v) for v in after.state_dict()["state"]} == {id(v) for v in kept[1]}


class Factored(torch.optim.Optimizer):
    """Keeps state of other shapes than its parameters', values that are no tensors, and some of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "names": ("x", None)})
        self.calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("rows", p.new_zeros(p.shape[0])).add_(p.grad.reshape(p.shape[0], -1).sum(1))
                state.setdefault("half", torch.zeros_like(p, dtype=torch.bfloat16)).add_(1)
                state["count"] = state.get("count", 0) + 1
                state.setdefault("history", []).append((state["count"], p.grad.mean().clone()))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
        super().load_state_dict({key: value for key, value in state.items() if key != "calls"})


def factored(model: nn.Module) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True)
    _, optimizer = accelerator.prepare(model, Factored(list(model.parameters())))
    return accelerator, optimizer


def test_state_of_any_shape_and_kind_comes_back(tmp_path: Path) -> None:
    saves, loads = make_model(), make_model()
    accelerator, before = factored(saves)
    step(saves, before)
    step(saves, before)
    accelerator.save_state(tmp_path / "s")
    other, after = factored(loads)
    other.load_state(tmp_path / "s")
    assert after.optimizer.calls == 2
    assert after.param_groups[0]["names"] == ("x", None)
    for mine, theirs in zip(loads.parameters(), saves.parameters(), strict=True):
        a, b = after.state[mine], before.state[theirs]
        assert a.keys() == b.keys()
        assert a["count"] == b["count"] == 2
        assert torch.equal(a["rows"], b["rows"])
        assert [(n, t.item()) for n, t in a["history"]] == [(n, t.item()) for n, t in b["history"]]


class Foreign(torch.optim.SGD):
    """Its state has no groups: it is saved and given back as it is."""

    momentum_of_all = 0.0

    def state_dict(self) -> Any:
        return {"mine": self.momentum_of_all, "tensor": torch.full((2,), self.momentum_of_all)}

    def load_state_dict(self, state: Any) -> None:
        assert set(state) == {"mine", "tensor"}
        self.momentum_of_all = state["mine"] + state["tensor"].sum().item()


def test_a_state_without_groups_is_given_back_as_it_is(tmp_path: Path) -> None:
    model = make_model()
    accelerator = Accelerator(cpu=True)
    _, optimizer = accelerator.prepare(model, Foreign(model.parameters(), lr=0.1))
    optimizer.optimizer.momentum_of_all = 2.5
    accelerator.save_state(tmp_path / "s")
    optimizer.optimizer.momentum_of_all = 0.0
    accelerator.load_state(tmp_path / "s")
    assert optimizer.optimizer.momentum_of_all == 7.5


def test_an_optimizer_that_never_stepped_loads_into_one_that_did(tmp_path: Path) -> None:
    saves, loads = make_model(), make_model()
    accelerator, before = run(saves, list(saves.parameters()))
    accelerator.save_state(tmp_path / "s")
    other, after = run(loads, list(loads.parameters()))
    step(loads, after)
    other.load_state(tmp_path / "s")
    assert not after.state_dict()["state"]
    step(saves, before)
    step(loads, after)
    for mine, theirs in zip(loads.parameters(), saves.parameters(), strict=True):
        assert torch.equal(mine, theirs)
