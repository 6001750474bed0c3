"""Training goes on in the middle of an accumulation window: whole models, and what is remembered when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Accelerator
from lockstep.errors import CheckpointError
from parallel import window_problem as windows
from parallel.window_problem import Run, Setup
from tests.refusals import expect_refusal
from train import problems

SETUPS = [
    (2, Setup()),
    (2, Setup(by_hand=True, no_sync=True)),
    (2, Setup(each_batch=True)),
    (2, Setup(ddp=(("gradient_as_bucket_view", True),))),
    (2, Setup(ddp=(("comm_hook", "fp16"),))),
]


@pytest.mark.parametrize(("world_size", "setup"), SETUPS, ids=str)
def test_training_goes_on_bit_for_bit(run_distributed, world_size: int, setup: Setup) -> None:
    assert run_distributed(windows.go_on_and_compare, world_size, setup) == [[]] * world_size


class Sometimes(nn.Module):
    """A layer that only the first micro-batch of a window uses, one that none uses, and a sparse embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4, sparse=True)
        self.always, self.sometimes, self.never = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, tokens: torch.Tensor, number: int) -> torch.Tensor:
        x = self.always(self.words(tokens))
        return self.sometimes(x) if number % windows.ACCUMULATION == 0 else x


def sometimes() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Sometimes()


def sometimes_loss(run: Run, number: int) -> tuple[torch.Tensor, int]:
    generator = torch.Generator().manual_seed(10 * number + run.accelerator.process_index)
    tokens = torch.randint(0, 11, (6,), generator=generator)
    return F.cross_entropy(run.model(tokens, number), tokens % 4), 6


@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_that_later_micro_batches_do_not_use_and_sparse_gradients_are_averaged_too(
    run_distributed, world_size: int
) -> None:
    setup = Setup(ddp=(("find_unused_parameters", True),))
    wrong = run_distributed(
        windows.go_on_and_compare, world_size, setup, make_model=sometimes, loss_of=sometimes_loss
    )
    assert wrong == [[]] * world_size


def hook_on_one_rank() -> list[int]:
    accelerator, plain = Accelerator(cpu=True), problems.make_model()
    calls: list[int] = []
    if accelerator.process_index == 1:
        plain[0].weight.register_hook(lambda gradient: calls.append(1))
    model = accelerator.prepare(plain)
    assert all(parameter.grad is None for parameter in plain.parameters())
    accelerator.backward(model(problems.make_rows(0, 0, 2)[0]).sum())
    return calls


def test_hooks_of_parameters_on_one_rank_see_no_gradient_while_a_model_is_prepared(run_distributed) -> None:
    assert run_distributed(hook_on_one_rank, 3) == [[], [1], []]


# -- what is remembered when -----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_are_cleared_before_the_window_go_on_bit_for_bit(
    run_distributed, world_size: int
) -> None:
    assert run_distributed(stop_before_clearing, world_size) == [(True, [])] * world_size


def stop_before_clearing() -> tuple[bool, list[str]]:
    run = Run(Setup())
    run.go(6, clears_first=True)
    saved = run.save()
    run.go(9, clears_first=True)
    again = Run(Setup())
    again.load(saved)
    again.go(9, clears_first=True)
    small = not any(True for _ in windows.tensors_in([window["models"] for window in saved.windows]))
    return small, windows.different(again.parameters(), run.parameters())


# -- another number of steps -----------------------------------------------------------------------------


def test_a_window_goes_on_with_another_number_of_steps() -> None:
    """One of three micro-batches, then one of two: the mean of both, as in plain torch."""
    run = Run(Setup())
    run.go(1)
    again = Run(Setup(accumulation=2))
    again.load(run.save())
    again.go(2)
    model = windows.problem.make_model()
    for tokens, labels in windows.problem.make_batches(windows.MICRO_BATCHES)[:2]:
        (windows.problem.loss_of(model, tokens, labels) / 2).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= windows.LEARNING_RATE * parameter.grad
    expected = dict(model.state_dict())
    assert windows.problem.difference(again.parameters(), expected) < 1e-6
    assert again.accelerator.gradient_state.micro_batch == 2


def test_a_window_that_should_have_ended_is_refused() -> None:
    run = Run(Setup())
    run.go(5)
    again = Run(Setup(accumulation=2))
    again.go(1)
    before = windows.portable(again.window.state_dict())
    expect_refusal(CheckpointError, "2 of 3", again.load, run.save())
    assert_unchanged(again, before)


# -- refusals --------------------------------------------------------------------------------------------


def rename(state: dict[str, Any]) -> None:
    state["models"][0]["local"]["stranger"] = state["models"][0]["local"].pop("scale")


def reshape(state: dict[str, Any]) -> None:
    state["models"][0]["local"]["scale"] = torch.zeros(2)


def add_model(state: dict[str, Any]) -> None:
    state["models"].append(state["models"][0])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (rename, "'stranger'"),
        (reshape, "'scale' has shape (2,)"),
        (add_model, "gradients of 2 models"),
    ],
)
def test_a_state_of_another_model_is_refused_before_anything_changes(spoil: Any, message: str) -> None:
    run = Run(Setup())
    run.go(4)
    saved = run.save()
    spoil(saved.windows[0])
    again = Run(Setup())
    again.go(2)
    before = windows.portable(again.window.state_dict())
    expect_refusal(CheckpointError, message, again.window.load_state_dicts, saved.windows, 0)
    assert_unchanged(again, before)


def assert_unchanged(run: Run, before: dict[str, Any]) -> None:
    after = run.window.state_dict()
    assert after["window"] == before["window"]
    gradients, expected = after["models"][0]["local"], before["models"][0]["local"]
    assert expected
    assert windows.different(gradients, expected) == []
