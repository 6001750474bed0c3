"""Optimizers whose parameters are not the prepared model's are refused at their first step, by name."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep import Accelerator
from lockstep.errors import UsageError
from parallel.optimizers import written as w
from parallel.optimizers.test_written import make_batch, make_model
from tests.frozen.verdicts import hold


def before_prepare(accelerator: Accelerator, model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator.prepare(model), optimizer


def before_prepare_written(accelerator: Accelerator, model: nn.Module) -> tuple[Any, Any]:
    optimizer = w.LARS(model.parameters())
    return accelerator.prepare(model), optimizer


def partly_before(accelerator: Accelerator, model: nn.Module) -> tuple[Any, Any]:
    head = list(model.head.parameters())  # type: ignore[union-attr]
    model = accelerator.prepare(model)
    return model, torch.optim.SGD([*head, nn.Parameter(torch.ones(2))], lr=0.1)


def of_the_prepared(accelerator: Accelerator, model: nn.Module) -> tuple[Any, Any]:
    model = accelerator.prepare(model)
    return model, torch.optim.AdamW(model.parameters())


def scheduled(accelerator: Accelerator, model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, _ = accelerator.prepare(model, scheduler)
    return model, optimizer


def of_a_copy(accelerator: Accelerator, model: nn.Module) -> tuple[Any, Any]:
    import copy

    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    return accelerator.prepare(model, optimizer)


def of_a_bare_parameter(accelerator: Accelerator, model: nn.Module) -> tuple[Any, Any]:
    temperature = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    return accelerator.prepare(model, optimizer)


def averages_model(accelerator: Accelerator, model: nn.Module) -> tuple[Any, Any]:
    return accelerator.prepare(model, w.AveragesModel(model.parameters(), model))


def inside_of_another(accelerator: Accelerator, model: nn.Module) -> tuple[Any, Any]:
    inner = w.LARS(model.parameters())
    model = accelerator.prepare(model)
    return model, w.Lookahead(inner)


REFUSED: dict[str, tuple[Callable[..., tuple[Any, Any]], list[str], str]] = {
    "before": (before_prepare, ["zero=1", "zero=2", "zero=3"], "would train nothing"),
    "written": (before_prepare_written, ["zero=1", "zero=3"], "LARS .*written.py.*would train nothing"),
    "partly": (partly_before, ["zero=2", "zero=3"], "holds 2 parameters that a model had before"),
    "prepared model's": (
        of_the_prepared,
        ["zero=1", "zero=3"],
        "AdamW .* was not prepared",
    ),
    "scheduled": (scheduled, ["zero=3"], "would train nothing"),
    "copy": (of_a_copy, ["ddp", "zero=2", "zero=3"], "of no prepared model"),
    "averages model": (
        averages_model,
        ["zero=2", "zero=3"],
        "AveragesModel uses a sharded .*written.py, line",
    ),
    "inside": (inside_of_another, ["zero=1", "zero=3"], "the values of that parameter are gone"),
    "bare": (
        of_a_bare_parameter,
        ["ddp", "zero=1", "zero=3"],
        r"holds 1 parameters \(shapes \(3,\)\) of no prepared",
    ),
}


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: int = 1) -> None:
    rank, ranks = accelerator.process_index, accelerator.num_processes
    for step in range(steps):
        tokens, labels = make_batch(step, (rank, ranks))
        accelerator.backward(nn.functional.cross_entropy(model(tokens), labels))
        optimizer.step()
        optimizer.zero_grad()


def refused() -> dict[str, str]:
    found = {}
    for name, (build, parallels, _) in REFUSED.items():
        for parallel in parallels:
            accelerator = Accelerator(cpu=True, parallel=parallel)
            with pytest.raises(UsageError) as error:
                train(accelerator, *build(accelerator, make_model()))
            found[f"{name} {parallel}"] = str(error.value)
            accelerator.free_memory()
    accelerator = Accelerator(cpu=True, parallel="zero=1")
    model = make_model()
    with pytest.raises(UsageError) as error:
        accelerator.prepare(model, w.LookAlike(model.parameters()))
    found["look-alike"] = str(error.value)
    found |= in_windows()
    accelerator = Accelerator(cpu=True, parallel="zero=2")
    model = make_model()
    model, optimizer = accelerator.prepare(model, w.NotElementwise(model.parameters()))
    with pytest.raises(UsageError) as error:
        train(accelerator, model, optimizer)
    found["not elementwise"] = str(error.value)
    accelerator.free_memory()
    found |= split_over_ranks()
    return found


def in_windows() -> dict[str, str]:
    """Under ddp an optimizer that was not prepared may step, but not on gradients that were not averaged."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = of_the_prepared(accelerator, make_model())
    train(accelerator, model, optimizer)
    with pytest.raises(UsageError) as unprepared, accelerator.accumulate(model):
        train(accelerator, model, optimizer)
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(raw)
    with pytest.raises(UsageError) as direct, accelerator.accumulate(model):
        accelerator._step.sync_gradients = False
        train(accelerator, model, raw)
    accelerator.free_memory()
    return {"window unprepared": str(unprepared.value), "window direct": str(direct.value)}


def split_over_ranks() -> dict[str, str]:
    found = {}
    for name, build in {"LBFGS": torch.optim.LBFGS, "LARS": w.LARS}.items():
        accelerator = Accelerator(cpu=True, parallel="pp=2 micro_batches=2")
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
        with pytest.raises(UsageError) as error:
            accelerator.prepare(model, build(model.parameters()))
        found[f"pp {name}"] = str(error.value)
        accelerator.free_memory()
    return found


def test_what_would_train_nothing_or_one_ranks_part_is_refused(run_distributed) -> None:
    import re

    ranks = run_distributed(refused, 2, timeout_s=240)
    hold(
        "optimizers, not as prepared", [{n: ("refused", text) for n, text in each.items()} for each in ranks]
    )
    for messages in ranks:
        for name, (_, parallels, pattern) in REFUSED.items():
            for parallel in parallels:
                assert re.search(pattern, messages[f"{name} {parallel}"]), messages[f"{name} {parallel}"]
        assert "not passed to prepare, inside an accumulation window" in messages["window unprepared"]
        pattern = "NotElementwise says elementwise=True, but aten.*norm.*written.py, line"
        assert re.search(pattern, messages["not elementwise"]), messages["not elementwise"]
        assert "LookAlike, which has a step() but is not a torch.optim.Optimizer" in messages["look-alike"]
        assert "called directly" in messages["window direct"]
        assert re.search("^LBFGS .*lbfgs.py.*pp=2", messages["pp LBFGS"])
        assert re.search("^LARS .*written.py, line .*pp=2", messages["pp LARS"])


def noise_of_other_seeds() -> str:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    torch.manual_seed(accelerator.process_index)
    model, optimizer = accelerator.prepare(model, w.NoisySGD(model.parameters(), lr=0.1))
    train(accelerator, model, optimizer)
    with pytest.raises(UsageError) as error:
        train(accelerator, model, optimizer)
    return str(error.value)


def test_noise_that_has_parted_replicas_is_refused(run_distributed) -> None:
    for message in run_distributed(noise_of_other_seeds, 2):
        assert "is no longer equal on all ranks" in message


def plain_step() -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return model.weight.flatten().tolist()


def collect(*_: object) -> None:
    gc.collect()


def collected_during_steps() -> list[bool]:
    """Accelerators of earlier trainings go in a garbage collection, while torch calls the hooks of all optimizers."""
    expected, found = plain_step(), []
    gc.disable()
    collecting = [
        register(collect)
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    for _ in range(4):
        accelerator = Accelerator(cpu=True)
        model = make_model()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        train(accelerator, model, optimizer)
        del accelerator, model, optimizer
        found.append(plain_step() == expected)
    for handle in collecting:
        handle.remove()
    gc.enable()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_trainings_that_are_collected_during_a_step_take_no_hook_out_of_torch(
    run_distributed, world_size: int
) -> None:
    assert run_distributed(collected_during_steps, world_size) == [[True] * 4] * world_size
