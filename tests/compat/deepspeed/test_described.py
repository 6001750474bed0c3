"""Optimizers and schedulers from the sections of a DeepSpeed JSON, against torch's made by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.compat.deepspeed import build_optimizer, build_scheduler
from lockstep.config import OptimizerConfig, SchedulerConfig
from lockstep.errors import ConfigError, UsageError
from lockstep.utils import DummyOptim, DummyScheduler
from tests.refusals import expect_refusal
from train import problems


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    for i in range(4):
        rows, labels = problems.make_rows(0, i, 8)
        optimizer.zero_grad()
        F.cross_entropy(model(rows), labels).backward()
        optimizer.step()
    return problems.parameters(model)


def any_parameters() -> Iterator[nn.Parameter]:
    return problems.make_model().parameters()


SGD, Adam, AdamW, RMSprop = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop


@pytest.mark.parametrize(
    ("name", "params", "options", "expected"),
    [
        ("Adam", {"lr": 0.1, "weight_decay": 0.5}, {}, (AdamW, {"lr": 0.1, "weight_decay": 0.5})),
        (
            "Adam",
            {"lr": 0.1, "weight_decay": 0.5, "adam_w_mode": False, "torch_adam": True},
            {},
            (Adam, {"lr": 0.1, "weight_decay": 0.5}),
        ),
        ("adamw", {"lr": 0.1}, {}, (AdamW, {"lr": 0.1, "weight_decay": 0.0})),
        (
            "AdamW",
            {"lr": "auto", "betas": [0.5, 0.9], "eps": "auto", "weight_decay": "auto"},
            {"lr": 0.2, "weight_decay": 0.3, "eps": 1e-3},
            (AdamW, {"lr": 0.2, "weight_decay": 0.3, "betas": (0.5, 0.9), "eps": 1e-3}),
        ),
        (
            "AdamW",
            {"bias_correction": True, "fp32_optimizer_states": True, "set_grad_none": True},
            {"lr": 0.2, "betas": (0.5, 0.9)},
            (AdamW, {"lr": 0.2, "weight_decay": 0.0, "betas": (0.5, 0.9)}),
        ),
        ("AdamW", {"lr": 0.1}, {"lr": 0.2}, (AdamW, {"lr": 0.1, "weight_decay": 0.0})),
        (
            "SGD",
            {"lr": 0.1, "momentum": 0.9, "nesterov": True},
            {},
            (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ),
        (
            "Adagrad",
            {"lr": 0.1},
            {"weight_decay": 0.1},
            (torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.1}),
        ),
        ("RMSprop", {"lr": 0.01, "centered": True}, {}, (RMSprop, {"lr": 0.01, "centered": True})),
        (
            "Adafactor",
            {"lr": 0.1, "eps": [None, 0.01]},
            {},
            (torch.optim.Adafactor, {"lr": 0.1, "eps": (None, 0.01)}),
        ),
        ("Rprop", {"lr": 0.1}, {}, (torch.optim.Rprop, {"lr": 0.1})),
    ],
)
def test_the_described_optimizer_trains_as_the_one_made_by_hand(
    name: str, params: dict[str, Any], options: dict[str, Any], expected: tuple[Any, dict[str, Any]]
) -> None:
    kind, values = expected
    model, reference = problems.make_model(), problems.make_model()
    before = dict(params)
    built = build_optimizer(OptimizerConfig(name, params), DummyOptim(model.parameters(), **options))
    assert type(built) is kind
    by_hand = kind(reference.parameters(), **values)
    assert problems.difference(trained(model, built), trained(reference, by_hand)) == 0
    assert params == before


def test_parameter_groups_keep_what_they_set_themselves() -> None:
    model = problems.make_model()
    first, second = list(model[0].parameters()), list(model[2].parameters())
    dummy = DummyOptim(
        [{"params": first, "weight_decay": 0.0}, {"params": second, "lr": 0.5}], lr=0.1, weight_decay=0.2
    )
    built = build_optimizer(OptimizerConfig("AdamW", {"lr": "auto", "weight_decay": "auto"}), dummy)
    found = [(group["lr"], group["weight_decay"], group["params"]) for group in built.param_groups]
    assert [values[:2] for values in found] == [(0.1, 0.0), (0.5, 0.2)]
    assert all(
        a is b for a, b in zip([p for *_, group in found for p in group], [*first, *second], strict=True)
    )


@pytest.mark.parametrize("style", ["generator", "named"])
def test_parameters_can_come_once_and_with_names(style: str) -> None:
    model = problems.make_model()
    dummy = DummyOptim(model.parameters() if style == "generator" else model.named_parameters())
    for _ in range(2):
        built = build_optimizer(OptimizerConfig("AdamW", {}), dummy)
        assert len(built.param_groups[0]["params"]) == 4


@pytest.mark.parametrize(
    ("name", "params", "options", "message"),
    [
        ("Lamb", {}, {}, "Lamb is not available"),
        ("Lion", {}, {}, "Lion is not available"),
        ("OneBitAdam", {}, {}, "OneBitAdam is not available"),
        ("ZeroOneAdam", {}, {}, "ZeroOneAdam is not available"),
        ("OneBitLamb", {}, {}, "OneBitLamb is not available"),
        ("Muon", {}, {}, "torch.optim.Muon and torch.optim.AdamW"),
        ("MuAdam", {}, {}, "belongs to the package 'mup'"),
        ("AdmaW", {}, {}, "Did you mean 'AdamW'"),
        ("Optimizer", {}, {}, "'Optimizer' is not known"),
        ("lr_scheduler", {}, {}, "is not known"),
        ("AdamW", {"beta": [0.9, 0.9]}, {}, "Did you mean 'betas'"),
        ("AdamW", {}, {"momentum": 0.9}, "no parameter 'momentum'"),
        ("SGD", {"adam_w_mode": True}, {}, "no parameter 'adam_w_mode'"),
        ("Rprop", {}, {"weight_decay": 0.1}, "no parameter 'weight_decay'"),
        ("AdamW", {"betas": "auto"}, {}, "betas is 'auto'"),
        ("AdamW", {"betas": [0.9]}, {}, "betas is [0.9]"),
        ("AdamW", {"lr": "1e-3"}, {}, "lr is '1e-3'"),
        ("AdamW", {"lr": float("nan")}, {}, "lr is nan"),
        ("AdamW", {"lr": None}, {}, "lr is None"),
        ("AdamW", {"lr": -1.0}, {}, "Invalid learning rate: -1.0"),
        ("AdamW", {"amsgrad": "perhaps"}, {}, "amsgrad=perhaps is not a truth value"),
        ("AdamW", {"adam_w_mode": False}, {}, "adam_w_mode=false, which contradicts its name"),
        ("Adam", {"bias_correction": False}, {}, "bias_correction=False is not available"),
        ("Adam", {"fp32_optimizer_states": False}, {}, "fp32_optimizer_states=False is not available"),
        ("AdamW", {"max_grad_norm": 1.0}, {}, "Write gradient_clipping at the top"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(
    name: str, params: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    dummy = DummyOptim(any_parameters(), **options)
    expect_refusal(ConfigError, message, build_optimizer, OptimizerConfig(name, params), dummy)


def test_a_placeholder_without_a_section_is_refused() -> None:
    expect_refusal(ConfigError, "'optimizer'", build_optimizer, None, DummyOptim(any_parameters()))


def optimizer_of(name: str = "AdamW") -> tuple[DummyOptim, torch.optim.Optimizer]:
    first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    dummy = DummyOptim([{"params": [first]}, {"params": [second], "lr": 0.05}], lr=0.2)
    return dummy, build_optimizer(OptimizerConfig(name, {"lr": "auto"}), dummy)


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[list[float]]:
    used = []
    for _ in range(steps):
        used.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return used


def test_auto_values_of_a_schedule_come_from_the_placeholder_and_the_optimizer() -> None:
    dummy, optimizer = optimizer_of()
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    config = SchedulerConfig("WarmupDecayLR", dict.fromkeys(names, "auto") | {"warmup_type": "linear"})
    placeholder = DummyScheduler(dummy, total_num_steps=10, warmup_num_steps=4)
    scheduler = build_scheduler(config, placeholder, optimizer)
    # linear up to each group's own rate at count 4, and down to 0 at 10; the count starts at -1
    heights = [0, 0, 1 / 4, 2 / 4, 3 / 4, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0, 0]
    assert rates(optimizer, scheduler, 13) == [pytest.approx([0.2 * h, 0.05 * h]) for h in heights]
    assert scheduler.counts_optimizer_steps  # type: ignore[attr-defined]


@pytest.mark.parametrize(("steps_per_call", "length"), [(1, 11), (2, 6), (4, 3)])
def test_the_length_of_a_script_is_divided_by_the_processes_and_the_warmup_is_not(
    steps_per_call: int, length: int
) -> None:
    dummy, optimizer = optimizer_of()
    config = SchedulerConfig("WarmupCosineLR", {"warmup_num_steps": "auto", "cos_min_ratio": 0.0})
    placeholder = DummyScheduler(dummy, total_num_steps=11, warmup_num_steps=2)
    used = rates(optimizer, build_scheduler(config, placeholder, optimizer, steps_per_call), 15)
    assert [i for i, (first, _) in enumerate(used) if first < 1e-9][2:] == list(range(length, 15))
    assert used[2][0] == pytest.approx(0.2)  # the end of the warm-up


def test_values_in_the_file_win_over_the_placeholder() -> None:
    dummy, optimizer = optimizer_of()
    params = {"warmup_num_steps": 2, "warmup_max_lr": 0.4, "warmup_type": "linear", "total_num_steps": 4}
    placeholder = DummyScheduler(dummy, total_num_steps=100, warmup_num_steps=50)
    scheduler = build_scheduler(SchedulerConfig("WarmupDecayLR", params), placeholder, optimizer, 4)
    expected = [0.0, 0.0, 0.2, 0.4, 0.2, 0.0]
    assert rates(optimizer, scheduler, 6) == [pytest.approx([rate, rate]) for rate in expected]


def test_a_warmup_longer_than_the_training_is_warned_of() -> None:
    dummy, optimizer = optimizer_of()
    config = SchedulerConfig("WarmupDecayLR", {"warmup_num_steps": 8, "total_num_steps": 5})
    with pytest.warns(UserWarning, match="5 optimizer steps.* 8"):
        build_scheduler(config, DummyScheduler(dummy), optimizer)


def test_a_callable_makes_the_scheduler_where_the_file_has_none() -> None:
    dummy, optimizer = optimizer_of()
    placeholder = DummyScheduler(
        dummy, lr_scheduler_callable=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5)
    )
    scheduler = build_scheduler(None, placeholder, optimizer)
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    assert scheduler.optimizer is optimizer
    assert scheduler.counts_optimizer_steps  # type: ignore[attr-defined]
    assert [first for first, _ in rates(optimizer, scheduler, 5)] == [0.2, 0.2, 0.1, 0.1, 0.05]


def test_torchs_schedules_can_be_named() -> None:
    dummy, optimizer = optimizer_of()
    config = SchedulerConfig("CosineAnnealingLR", {"T_max": 4, "eta_min": "auto"})
    scheduler = build_scheduler(config, DummyScheduler(dummy, eta_min=0.01), optimizer)
    _, other = optimizer_of()
    expected = torch.optim.lr_scheduler.CosineAnnealingLR(other, T_max=4, eta_min=0.01)
    assert rates(optimizer, scheduler, 6) == rates(other, expected, 6)
    assert scheduler.counts_optimizer_steps  # type: ignore[attr-defined]
    json.dumps(scheduler.state_dict())


@pytest.mark.parametrize(
    ("name", "params", "options", "message"),
    [
        (
            "WarmupDecayLR",
            {"total_num_steps": "auto"},
            {},
            "total_num_steps is 'auto', but DummyScheduler gives no",
        ),
        ("WarmupDecayLR", {}, {}, "needs total_num_steps"),
        ("WarmupDecayLR", {}, {"total_num_steps": -1}, "DummyScheduler.total_num_steps=-1"),
        (
            "WarmupLR",
            {"warmup_num_steps": "auto"},
            {"warmup_num_steps": 1.5},
            "DummyScheduler.warmup_num_steps=1.5",
        ),
        ("WarmupLR", {"warmup_type": "auto"}, {}, "warmup_type is 'auto'"),
        ("WarmupLR", {}, {"cycle_min_lr": 1}, "no parameter 'cycle_min_lr'"),
        ("WarmupLr", {}, {}, "Did you mean 'WarmupLR'"),
        ("OneCycle", {}, {}, "Name torch's OneCycleLR"),
        ("LambdaLR", {}, {}, "'LambdaLR' is not available from a file"),
        ("ReduceLROnPlateau", {}, {}, "not available from a file"),
        ("StepLR", {"step": 1}, {}, "no parameter 'step'"),
        ("StepLR", {}, {}, "torch refuses the schedule StepLR"),
        ("WarmupLR", {}, {"lr_scheduler_callable": lambda o: o}, "but both of them"),
    ],
)
def test_a_schedule_that_cannot_be_built_is_refused_by_name(
    name: str, params: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    dummy, optimizer = optimizer_of()
    scheduler = DummyScheduler(dummy, **options)
    expect_refusal(ConfigError, message, build_scheduler, SchedulerConfig(name, params), scheduler, optimizer)


def test_a_placeholder_with_nothing_behind_it_is_refused() -> None:
    dummy, optimizer = optimizer_of()
    expect_refusal(ConfigError, "neither", build_scheduler, None, DummyScheduler(dummy), optimizer)
    with pytest.raises(UsageError, match="int"):
        build_scheduler(None, DummyScheduler(dummy, lr_scheduler_callable=lambda _: 3), optimizer)  # type: ignore
