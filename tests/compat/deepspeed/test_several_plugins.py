"""Several DeepSpeed plugins in one run: models of different stages train as whole ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator
from lockstep.errors import ConfigError
from lockstep.state import AcceleratorState
from lockstep.utils import DeepSpeedPlugin, get_active_deepspeed_plugin
from tests.refusals import expect_refusal

ROWS = 32


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 8, generator=source), torch.randn(ROWS, 8, generator=source)


def loss_of(student: nn.Module, teacher: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found, taught = student(x), teacher(x)
    return nn.functional.mse_loss(found, taught) + (found - y).square().mean() + (taught - y).square().mean()


def optimizers(student: nn.Module, teacher: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return torch.optim.AdamW(student.parameters(), lr=0.01), torch.optim.AdamW(teacher.parameters(), lr=0.02)


def sharded(first: int, second: int, steps: int, folder: str) -> list[Any]:
    plugins = {"student": DeepSpeedPlugin(zero_stage=first), "teacher": DeepSpeedPlugin(zero_stage=second)}
    run = Accelerator(cpu=True, deepspeed_plugins=plugins, gradient_accumulation_steps=steps)
    assert get_active_deepspeed_plugin(run.state) is plugins["student"] is run.deepspeed_plugin
    assert run.state.deepspeed_plugins == plugins
    student, teacher = net(1), net(2)
    of_student, of_teacher = optimizers(student, teacher)
    loader = DataLoader(TensorDataset(*data()), batch_size=8 // run.num_processes)
    student, of_student, loader = run.prepare(student, of_student, loader)
    AcceleratorState().select_deepspeed_plugin("teacher")
    assert run.deepspeed_plugin is AcceleratorState().deepspeed_plugin is plugins["teacher"]
    teacher, of_teacher = run.prepare(teacher, of_teacher)
    losses = []
    for x, y in loader:
        with run.accumulate(student, teacher):
            loss = loss_of(student, teacher, x, y)
            run.backward(loss)
            for optimizer in (of_student, of_teacher):
                optimizer.step()
                optimizer.zero_grad()
        losses.append(float(run.reduce(loss.detach(), "mean")))
    weights = [run.get_state_dict(model) for model in (student, teacher)]
    run.save_state(folder)
    with torch.no_grad():
        for model in (student, teacher):
            for parameter in model.parameters():
                parameter.zero_()
    run.load_state(folder)
    for model, saved in zip((student, teacher), weights, strict=True):
        again = run.get_state_dict(model)
        assert all(torch.equal(again[name], value) for name, value in saved.items())
    return [losses, *weights]


def whole(steps: int) -> list[Any]:
    student, teacher = net(1), net(2)
    both = optimizers(student, teacher)
    x, y = data()
    losses = []
    for number, start in enumerate(range(0, ROWS, 8)):
        loss = loss_of(student, teacher, x[start : start + 8], y[start : start + 8])
        (loss / steps).backward()
        losses.append(loss.item())
        if (number + 1) % steps == 0:
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
    return [losses, student.state_dict(), teacher.state_dict()]


@pytest.mark.parametrize(("first", "second", "steps"), [(2, 3, 1), (3, 1, 2), (1, 2, 2)])
def test_models_of_two_stages_train_as_whole_ones(
    run_distributed: Any, tmp_path: Any, first: int, second: int, steps: int
) -> None:
    losses, *models = whole(steps)
    (found, *weights), *_ = run_distributed(sharded, 2, first, second, steps, str(tmp_path / "state"))
    assert found == pytest.approx(losses, rel=1e-6)
    for here, expected in zip(weights, models, strict=True):
        assert all(torch.allclose(here[name], value, atol=2e-6) for name, value in expected.items())


def test_names_are_those_that_were_given() -> None:
    several = [DeepSpeedPlugin(zero_stage=2), DeepSpeedPlugin(zero_stage=3)]
    run = Accelerator(cpu=True, deepspeed_plugins=several)
    run.state.select_deepspeed_plugin("plugin_1")
    assert run.deepspeed_plugin is several[1] and run.parallel.zero == 3
    with pytest.raises(ValueError, match="'teacher'.*plugin_0, plugin_1"):
        run.state.select_deepspeed_plugin("teacher")
    assert Accelerator(cpu=True).state.deepspeed_plugins == run.state.deepspeed_plugins
    with pytest.raises(ValueError, match="'first'"):
        Accelerator(cpu=True, parallel={}).state.select_deepspeed_plugin("first")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clipping": 0.5}, "but 'a' does not"),
        ({"offload_param_device": "cpu"}, "deepspeed_plugins['b']"),
        ({"zero_stage": 0}, "deepspeed_plugins['b'] has stage 0"),
    ],
)
def test_plugins_that_differ_in_more_are_refused(options: dict[str, Any], message: str) -> None:
    plugins = {"a": DeepSpeedPlugin(zero_stage=2), "b": DeepSpeedPlugin(**{"zero_stage": 3, **options})}
    expect_refusal(ConfigError, message, Accelerator, cpu=True, deepspeed_plugins=plugins)
