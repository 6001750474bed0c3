"""The prepared optimizer: real steps only, everything else is the user's optimizer's own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Accelerator
from lockstep.errors import UsageError
from tests.refusals import expect_refusal
from train import problems


def test_step_and_zero_grad_do_nothing_inside_a_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    plain = problems.make_model()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    before = problems.parameters(plain)
    changed = []
    for i in range(6):
        with accelerator.accumulate(model):
            rows, labels = problems.make_rows(0, i, 4)
            accelerator.backward(F.cross_entropy(model(rows), labels))
            optimizer.step()
            optimizer.zero_grad()
            changed.append(problems.difference(problems.parameters(plain), before) > 0)
            before = problems.parameters(plain)
            assert (plain[0].weight.grad is None) == accelerator.sync_gradients
    assert changed == [False, False, True, False, False, True]


def test_the_users_optimizer_shows_through() -> None:
    accelerator = Accelerator(cpu=True)
    plain = problems.make_model()
    own = torch.optim.AdamW(plain.parameters(), lr=0.1, betas=(0.8, 0.9))
    _, optimizer = accelerator.prepare(plain, own)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.optimizer is own
    assert optimizer.param_groups is own.param_groups
    assert optimizer.state is own.state
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert repr(optimizer) == repr(own)
    optimizer.param_groups[0]["lr"] = 0.5
    assert own.param_groups[0]["lr"] == 0.5
    extra = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [extra], "lr": 0.2})
    assert own.param_groups[1]["lr"] == 0.2
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    optimizer.step()
    assert steps == [1]
    optimizer.train()
    optimizer.eval()


@pytest.mark.parametrize(
    ("mixed_precision", "copied"),
    [("no", copy.deepcopy), ("fp16", lambda value: pickle.loads(pickle.dumps(value)))],
)
def test_a_copy_has_parameters_and_state_of_its_own(
    mixed_precision: str, copied: Callable[[Any], Any]
) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    plain = problems.make_model()
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))
    rows, labels = problems.make_rows(0, 0, 4)
    accelerator.backward(F.cross_entropy(model(rows), labels))
    optimizer.step()
    other = copied(optimizer)
    assert torch.equal(other.param_groups[0]["params"][0], plain[0].weight)
    assert other.param_groups[0]["params"][0] is not plain[0].weight
    before = problems.parameters(plain)
    other.zero_grad()
    other.param_groups[0]["params"][0].grad = torch.ones_like(plain[0].weight)
    other.optimizer.step()
    assert problems.difference(problems.parameters(plain), before) == 0
    assert not torch.equal(other.param_groups[0]["params"][0], plain[0].weight)


def test_its_state_dict_is_that_of_the_users_optimizer() -> None:
    accelerator = Accelerator(cpu=True)
    plain = problems.make_model()
    own = torch.optim.Adam(plain.parameters())
    model, optimizer = accelerator.prepare(plain, own)
    rows, labels = problems.make_rows(0, 0, 4)
    accelerator.backward(F.cross_entropy(model(rows), labels))
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved.keys() == own.state_dict().keys()
    other = torch.optim.Adam(problems.make_model().parameters())
    other.load_state_dict(saved)
    optimizer.load_state_dict(saved)
    for one, two in zip(own.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_closure_under_fp16_is_refused() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    plain = problems.make_model()
    _, optimizer = accelerator.prepare(plain, torch.optim.LBFGS(plain.parameters()))
    expect_refusal(UsageError, "closure", optimizer.step, lambda: torch.tensor(0.0))
