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
    (1, Setup()),
    (2, Setup()),
    (2, Setup(weighted=True)),
    (2, Setup(by_hand=True, no_sync=True)),
    (2, Setup(each_batch=True)),
    (2, Setup(precision="fp16")),
    (2, Setup(precision="bf16")),
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


class Counting(nn.Module):
    """Its output depends on what this rank has seen since it last took rank 0's buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(problems.FEATURES, problems.CLASSES)
        self.register_buffer("seen", torch.zeros(problems.FEATURES))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen += rows.mean(0)
        return self.layer(rows + self.seen)


def counting() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Counting()


def counting_loss(run: Run, number: int) -> tuple[torch.Tensor, int]:
    rows, labels = problems.make_rows(run.accelerator.process_index, number, 4)
    return F.cross_entropy(run.model(rows), labels), 4


def test_each_rank_goes_on_with_its_own_buffers(run_distributed) -> None:
    wrong = run_distributed(windows.go_on_and_compare, 2, Setup(), make_model=counting, loss_of=counting_loss)
    assert wrong == [[]] * 2


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


def remembered(run: Run) -> tuple[int, int]:
    """Number of gradients, and of those that are only known to exist."""
    (model,) = run.window.state_dict()["models"]
    return len(model["local"]) + len(model["reduced"]), len(model["spent"])


def test_gradients_are_remembered_until_their_optimizer_has_stepped_or_they_are_cleared() -> None:
    run = Run(Setup(by_hand=True))
    trained = sum(p.requires_grad for p in run.plain.parameters())
    assert remembered(run) == (0, 0)
    run.go(2)
    assert remembered(run) == (trained, 0)
    run.go(3)
    assert remembered(run) == (0, 0)
    run.accelerator.backward(windows.token_loss(run, 0)[0])
    run.optimizer.step()
    assert remembered(run) == (0, trained)
    run.accelerator.backward(windows.token_loss(run, 1)[0])
    assert remembered(run) == (trained, 0)
    run.optimizer.optimizer.step()  # the user's own
    assert remembered(run) == (0, trained)
    run.optimizer.zero_grad()
    assert remembered(run) == (0, 0)


def test_gradients_that_another_optimizer_waits_for_are_remembered() -> None:
    accelerator = Accelerator(cpu=True)
    model = problems.make_model()
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
    model, first, second = accelerator.prepare(model, first, second)
    window = windows.window_of(accelerator)
    rows, labels = problems.make_rows(0, 0, 4)
    accelerator.backward(F.cross_entropy(model(rows), labels))
    first.step()
    (saved,) = window.state_dict()["models"]
    assert sorted(saved["local"]) == ["2.bias", "2.weight"]
    assert saved["spent"] == ["0.weight", "0.bias"]


def test_without_backward_of_the_accelerator_all_gradients_are_remembered() -> None:
    run = Run(Setup(by_hand=True))
    windows.token_loss(run, 0)[0].backward()
    run.optimizer.step()
    windows.token_loss(run, 1)[0].backward()
    assert remembered(run)[0] > 0


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


def test_gradients_that_were_cleared_to_zeros_are_there_again() -> None:
    run = Run(Setup())
    run.go(3, clears_first=True)
    run.optimizer.zero_grad(set_to_none=False)
    again = Run(Setup())
    again.load(run.save())
    for name, parameter in again.plain.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


@pytest.mark.parametrize("weighted", [False, True])
def test_a_closed_window_clears_the_one_that_is_open(weighted: bool) -> None:
    run = Run(Setup(weighted=weighted))
    run.go(3)
    saved = run.save()
    run.go(5)
    run.load(saved)
    assert all(parameter.grad is None for parameter in run.plain.parameters())
    run.go(9)
    through = Run(Setup(weighted=weighted))
    through.go(9)
    assert windows.different(run.parameters(), through.parameters()) == []


# -- another number of steps -----------------------------------------------------------------------------


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


def test_no_state_at_all_is_refused() -> None:
    with pytest.raises(CheckpointError):
        Run(Setup()).window.load_state_dicts([], 0)


def assert_unchanged(run: Run, before: dict[str, Any]) -> None:
    after = run.window.state_dict()
    assert after["window"] == before["window"]
    gradients, expected = after["models"][0]["local"], before["models"][0]["local"]
    assert expected
    assert windows.different(gradients, expected) == []
