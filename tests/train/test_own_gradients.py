"""Gradients that a script changes inside of a window are noticed in the first one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lockstep import Accelerator
from lockstep.errors import UsageError
from lockstep.preparation import OwnGradients
from tests.refusals import expect_refusal
from train import problems


def windows_that_notice(change: Any, count: int) -> list[int]:
    """The numbers of the windows in which ``change`` of a gradient is refused."""
    gradient = torch.ones(3)
    step: Any = SimpleNamespace(is_in_window=False, sync_gradients=True)
    own = OwnGradients(step, lambda: iter([("weight", gradient)]))
    noticed = []
    for window in range(1, count + 1):
        step.is_in_window, step.sync_gradients = True, False
        own.before_backward()
        own.after_backward()
        change(gradient)
        try:
            own.before_backward()
        except UsageError:
            noticed.append(window)
        # The last backward of the window.
        step.sync_gradients = True
        own.after_backward()
    return noticed


def test_a_changed_gradient_is_noticed_in_the_first_window() -> None:
    assert windows_that_notice(lambda gradient: gradient.data.mul_(2), 2)[0] == 1


def test_unchanged_gradients_are_left_alone() -> None:
    assert windows_that_notice(lambda gradient: None, 5) == []


@pytest.mark.parametrize("kind", ["no_grad", "detach", "item"])
def test_a_loss_without_a_gradient_is_refused_by_its_reason(kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(problems.make_model())
    rows, labels = problems.make_rows(0, 0, 4)
    with torch.set_grad_enabled(kind != "no_grad"):
        loss = F.cross_entropy(model(rows), labels)
    given = loss.item() if kind == "item" else loss.detach()
    expect_refusal(UsageError, "torch.no_grad()", accelerator.backward, given)
