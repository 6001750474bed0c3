"""Attributes that Accelerate's clients set: what is refused, and what holds on several ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import Accelerator, GradScalerKwargs, InitProcessGroupKwargs
from lockstep.errors import UsageError
from lockstep.utils import AORecipeKwargs, ProjectConfiguration, compile_regions
from tests.refusals import expect_refusal


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("init_handler", InitProcessGroupKwargs(backend="gloo")),
        ("scaler_handler", GradScalerKwargs(init_scale=2.0)),
        ("ao_recipe_handler", AORecipeKwargs()),
    ],
)
def test_what_was_read_when_the_accelerator_was_made_is_refused(name: str, value: object) -> None:
    accelerator = Accelerator(cpu=True)
    expect_refusal(UsageError, f"{name} was set", setattr, accelerator, name, value)
    expect_refusal(UsageError, type(value).__name__, setattr, accelerator, name, value)
    setattr(accelerator, name, getattr(accelerator, name))


def test_a_project_is_refused_once_there_are_checkpoints(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    other = ProjectConfiguration(str(tmp_path / "other"))
    accelerator.save_state(str(tmp_path / "state"))
    expect_refusal(
        UsageError, "project_configuration was set", setattr, accelerator, "project_configuration", other
    )
    assert accelerator.project_dir is None


def test_what_belongs_to_another_object_is_refused() -> None:
    one, other = Accelerator(cpu=True), Accelerator(cpu=True)
    expect_refusal(UsageError, "gradient_state was set", setattr, one, "gradient_state", other.gradient_state)
    loader = one.prepare(DataLoader(torch.arange(4)))
    expect_refusal(
        UsageError, "base_dataloader", setattr, loader, "base_dataloader", DataLoader(torch.arange(6))
    )
    assert len(loader) == 4
    expect_refusal(UsageError, "lomo_backward", one.lomo_backward, torch.ones(()), 0.1)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def doubled(tower: Tower, x: torch.Tensor) -> torch.Tensor:
    return 2 * Tower.forward(tower, x)


class Outer(nn.Module):
    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tower(x)


@pytest.mark.parametrize("around", [lambda tower: tower, Outer])
def test_regions_of_a_replaced_forward_are_compiled(around: Callable[[Tower], nn.Module]) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    tower = Tower()
    tower.forward = doubled.__get__(tower)  # type: ignore[method-assign]
    model = around(tower)
    x = torch.randn(3, 2)
    expected = model(x)
    torch.compiler.reset()
    assert torch.equal(compile_regions(model, backend=backend)(x), expected)
    assert graphs  # it ran compiled code
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    "replacement",
    [
        lambda tower: functools.partial(doubled, tower),
        lambda tower: lambda x: doubled(tower, x),
        lambda tower: doubled.__get__(Tower()),
    ],
)
def test_regions_of_a_forward_that_calls_the_model_itself_are_refused(
    replacement: Callable[[Tower], Any],
) -> None:
    tower = Tower()
    tower.forward = replacement(tower)  # type: ignore[method-assign]
    expect_refusal(UsageError, "Tower.forward was replaced", compile_regions, tower, backend="eager")


class Selective(nn.Module):
    """As magvit2-pytorch's tokenizer: ``parameters`` is a list, and lacks those of the critic."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.critic = nn.Linear(3, 4), nn.Linear(4, 2)

    def parameters(self, recurse: bool = True) -> Any:
        return [*self.body.parameters()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(torch.tanh(self.body(x)))


def rows(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def train_selective(parallel: str) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, parallel=parallel, watch=False)
    model = Selective()
    optimizers = [torch.optim.Adam(part, lr=0.1) for part in (model.parameters(), model.critic.parameters())]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    for step in range(3):
        accelerator.backward(model(rows(accelerator.process_index, step)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize(
    ("world_size", "parallel"), [(2, "ddp"), (4, "zero=1"), (2, "zero=2"), (2, "zero=3")]
)
def test_parameters_that_are_a_list_of_some_train_as_in_torch(
    run_distributed: Callable[..., list[Any]], parallel: str, world_size: int
) -> None:
    model = Selective()
    own = torch.optim.Adam([value for _, value in model.named_parameters()], lr=0.1)
    for step in range(3):
        batch = torch.cat([rows(rank, step) for rank in range(world_size)])
        model(batch).square().mean().backward()
        own.step()
        own.zero_grad()
    for found in run_distributed(train_selective, world_size, parallel):
        assert list(found) == list(model.state_dict())
        for name, value in model.state_dict().items():
            assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-6), name
