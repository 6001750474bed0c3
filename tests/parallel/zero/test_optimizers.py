"""Every optimizer of torch on shards: plain torch's numbers, or a refusal. Whenever it is built and prepared."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Accelerator
from lockstep.errors import UsageError
from parallel import zero_problem as problem
from parallel.zero.test_parity import full

STEPS_BEFORE, STEPS = 2, 3
CLASSES = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}
NEED_MORE = ("LBFGS", "SparseAdam")
"""A closure (see ``optimizers/test_written.py``), and sparse gradients."""
SUPPORTED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in CLASSES if name not in NEED_MORE),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.1, "fused": True}),
    ("Adagrad", {"fused": True}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": False}),
    ("AdamW", {"lr": torch.tensor(1e-2)}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("ASGD", {"t0": 2.0}),
    ("NAdam", {"decoupled_weight_decay": True}),
]

ON_FOUR_RANKS = [case for case in SUPPORTED if case in (("Muon", {}), ("AdamW", {}), ("Adadelta", {}))]


def make_model() -> nn.Sequential:
    """Without scalars: groups that hold them too are in ``test_parity``."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)) for _ in range(2)]
        return nn.Sequential(*blocks, nn.Linear(6, 3))


def make_optimizer(name: str, options: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    for_muon = [p for p in model.parameters() if p.ndim == 2 and len(p) >= 4]
    return CLASSES[name](for_muon if name == "Muon" else model.parameters(), **options)


def train(
    steps: range,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    part: tuple[int, int] = (0, 1),
) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        rows, labels = (
            torch.randn(8, 6, generator=generator),
            torch.randint(0, 3, (8,), generator=generator),
        )
        rank, ranks = part
        loss = F.cross_entropy(model(rows.chunk(ranks)[rank]), labels.chunk(ranks)[rank])
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()


def sharded(cases: list[tuple[str, dict[str, Any]]], stage: int) -> list[dict[str, Any]]:
    """Some plain steps, and more after prepare."""
    torch.set_num_threads(1)
    results = []
    for name, options in cases:
        accelerator = Accelerator(cpu=True, parallel=f"zero={stage}")
        model = make_model()
        optimizer = make_optimizer(name, options, model)
        train(range(STEPS_BEFORE), model, optimizer)
        optimizer.zero_grad()
        model, optimizer = accelerator.prepare(model, optimizer)
        part = (accelerator.process_index, accelerator.num_processes)
        train(range(STEPS_BEFORE, STEPS_BEFORE + STEPS), model, optimizer, accelerator.backward, part)
        whole_state = [
            (parameter.shape, key, value.shape)
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
            and value.shape == parameter.shape
            and not hasattr(value, "placements")
        ]
        assert not whole_state, f"{name} keeps whole state: {whole_state}"
        results.append({n: full(p) for n, p in model.named_parameters()})
    return results


@pytest.mark.parametrize(("world_size", "stage", "cases"), [(2, 1, SUPPORTED), (4, 3, ON_FOUR_RANKS)])
def test_optimizers_with_state_go_on_as_in_plain_torch(
    run_distributed, world_size: int, stage: int, cases: list[tuple[str, dict[str, Any]]]
) -> None:
    for result in run_distributed(sharded, world_size, cases, stage):
        for (name, options), actual in zip(cases, result, strict=True):
            model = make_model()
            optimizer = make_optimizer(name, options, model)
            train(range(STEPS_BEFORE + STEPS), model, optimizer)
            expected = {n: p.detach() for n, p in model.named_parameters()}
            assert problem.difference(actual, expected) < 1e-5, (name, options)


def refused() -> str:
    accelerator = Accelerator(cpu=True, parallel="zero=2")
    model = make_model()
    with pytest.raises(UsageError) as error:
        accelerator.prepare(model, torch.optim.SparseAdam(list(model.parameters())))
    return str(error.value)


def test_an_optimizer_of_sparse_gradients_is_refused_by_name(run_distributed) -> None:
    for message in run_distributed(refused, 2):
        assert message.startswith(
            "SparseAdam takes sparse gradients, but those of sharded parameters are dense"
        )


# -- when it is built and prepared -----------------------------------------------------------------------


def prepared_in_order(order: str) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, parallel="zero=3")
    model: Any = make_model()
    optimizer: Any
    if order != "built after":
        optimizer = make_optimizer("AdamW", {"lr": 0.01}, model)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        train(range(STEPS_BEFORE), model, optimizer)
        scheduler.step()
        optimizer.zero_grad()
    if order == "together":
        scheduler, optimizer, model = accelerator.prepare(scheduler, optimizer, model)
    elif order == "optimizer first":
        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
        model = accelerator.prepare(model)
    elif order == "model first":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
        scheduler = accelerator.prepare(scheduler)
    else:
        train(range(STEPS_BEFORE), model, built := make_optimizer("AdamW", {"lr": 0.01}, model))
        built.zero_grad()
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(make_optimizer("AdamW", {"lr": 0.01}, model))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        scheduler.step()
    part = (accelerator.process_index, accelerator.num_processes)
    for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS):
        train(range(step, step + 1), model, optimizer, accelerator.backward, part)
        (scheduler.scheduler if hasattr(scheduler, "scheduler") else scheduler).step()
    return {n: full(p) for n, p in model.named_parameters()}


@pytest.mark.parametrize("order", ["together", "optimizer first", "model first", "built after"])
def test_the_order_of_preparing_makes_no_difference(run_distributed, order: str) -> None:
    model = make_model()
    optimizer = make_optimizer("AdamW", {"lr": 0.01}, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    train(range(STEPS_BEFORE), model, optimizer)
    if order == "built after":
        optimizer = make_optimizer("AdamW", {"lr": 0.01}, model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    scheduler.step()
    for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS):
        train(range(step, step + 1), model, optimizer)
        scheduler.step()
    expected = {n: p.detach() for n, p in model.named_parameters()}
    for actual in run_distributed(prepared_in_order, 2, order):
        assert problem.difference(actual, expected) < 1e-5
