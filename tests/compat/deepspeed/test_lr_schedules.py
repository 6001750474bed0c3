"""The schedules of DeepSpeed files, against sequences recorded from ``deepspeed.runtime.lr_schedules``.

The file beside this one says from which version. Each row holds what one optimizer step used: the learning
rates of two parameter groups (0.2, 0.05 before the schedule began).
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.compat.deepspeed import ScheduledLR, parse_schedule
from lockstep.errors import ConfigError
from tests.refusals import expect_refusal

RECORDED = json.loads(Path(__file__).with_name("deepspeed_lr_schedules.json").read_text(encoding="utf-8"))
CASES = RECORDED["cases"]


def adam(lr: Any = 0.2) -> torch.optim.Optimizer:
    first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    return torch.optim.Adam([{"params": [first]}, {"params": [second], "lr": lr / 4}], lr=lr)


def steps(optimizer: torch.optim.Optimizer, scheduler: ScheduledLR, count: int) -> list[list[float]]:
    used = []
    for _ in range(count):
        used.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return used


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['type']}-{CASES.index(case)}")
def test_each_step_has_the_learning_rates_of_deepspeed(case: dict[str, Any]) -> None:
    optimizer = adam()
    scheduler = ScheduledLR(optimizer, parse_schedule(case["type"], case["params"], groups=2))
    for i, expected in enumerate(case["lrs"]):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected, rel=1e-12), i
        assert scheduler.get_last_lr() == pytest.approx(expected, rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_the_recorded_sequences_cover_every_schedule_beyond_its_end() -> None:
    assert {case["type"] for case in CASES} == {
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
    }
    assert all(len(case["lrs"]) > case["params"].get("total_num_steps", 0) for case in CASES)


@pytest.mark.parametrize("case", [CASES[5], CASES[8]], ids=lambda case: case["type"])
def test_a_run_that_continues_from_its_state_has_the_rest_of_the_sequence(case: dict[str, Any]) -> None:
    schedule = parse_schedule(case["type"], case["params"], groups=2)
    optimizer = adam()
    scheduler = ScheduledLR(optimizer, schedule)
    steps(optimizer, scheduler, 5)
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    other = adam()
    resumed = ScheduledLR(other, schedule)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    rest = case["lrs"][5:]
    assert steps(other, resumed, len(rest)) == [pytest.approx(row, rel=1e-12) for row in rest]


def test_its_state_holds_numbers_only() -> None:
    scheduler = ScheduledLR(adam(), parse_schedule("WarmupLR", {}, groups=2))
    json.dumps(scheduler.state_dict())


def test_learning_rates_that_are_tensors_are_changed_in_place() -> None:
    optimizer = adam(torch.tensor(0.2))
    rates = [group["lr"] for group in optimizer.param_groups]
    scheduler = ScheduledLR(optimizer, parse_schedule("WarmupCosineLR", CASES[8]["params"], groups=2))
    assert steps(optimizer, scheduler, 12) == [pytest.approx(row, rel=1e-5) for row in CASES[8]["lrs"][:12]]
    assert all(rate is group["lr"] for rate, group in zip(rates, optimizer.param_groups, strict=True))


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmupLR", {"warmup_steps": 3}, "Did you mean 'warmup_num_steps'"),
        ("WarmupLR", {"total_num_steps": 3}, "no parameter 'total_num_steps'"),
        ("WarmupDecayLR", {}, "needs total_num_steps"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps=0"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "warmup_num_steps=2.5"),
        ("WarmupLR", {"warmup_num_steps": None}, "warmup_num_steps=None"),
        ("WarmupLR", {"warmup_type": "cosine"}, "warmup_type is 'cosine'"),
        ("WarmupLR", {"warmup_max_lr": "1e-3"}, "warmup_max_lr is '1e-3'"),
        ("WarmupLR", {"warmup_max_lr": float("nan")}, "warmup_max_lr is nan"),
        ("WarmupLR", {"warmup_max_lr": -1}, "warmup_max_lr is -1"),
        ("WarmupLR", {"warmup_max_lr": True}, "warmup_max_lr is True"),
        ("WarmupLR", {"warmup_max_lr": [1, 2, 3]}, "warmup_max_lr has 3 values"),
    ],
)
def test_what_is_not_a_schedule_is_refused_by_name(name: str, params: dict[str, Any], message: str) -> None:
    expect_refusal(ConfigError, message, parse_schedule, name, params, groups=2)
