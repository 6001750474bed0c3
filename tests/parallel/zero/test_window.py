"""Sharded models go on in the middle of an accumulation window."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallel import window_problem as windows
from parallel import zero_problem as problem
from parallel.window_problem import Setup

# tests/checkpoint/test_resume_audit.py has the stages, weights and precisions, and other worlds.
SAME_WORLD = [
    (2, Setup("zero=1", by_hand=True)),
    (2, Setup("zero=3 offload", by_hand=True, no_sync=True)),
    (2, Setup("zero=1 reduce=fp32", precision="bf16")),
    (2, Setup("zero=3 quantized_gradients=int8")),
    (2, Setup("zero=2", each_batch=True)),
    (4, Setup("zero=2 replicate=2", weighted=True)),
    (4, Setup("zero=3 hpz=2")),
]


@pytest.mark.parametrize(("world_size", "setup"), SAME_WORLD, ids=str)
def test_training_goes_on_bit_for_bit(run_distributed, world_size: int, setup: Setup) -> None:
    assert run_distributed(windows.go_on_and_compare, world_size, setup) == [[]] * world_size


def mean_gradient(saved: windows.Saved) -> dict[str, torch.Tensor]:
    run = windows.Run(Setup(precision="fp16"))
    run.load(saved)
    scale = run.accelerator.scaler.get_scale()
    return {name: p.grad / scale for name, p in run.plain.named_parameters() if p.grad is not None}


def test_sums_of_half_precision_over_some_of_the_ranks_become_means(run_distributed) -> None:
    [saved] = run_distributed(windows.save_at, 4, Setup("zero=2 replicate=2", precision="fp16"), 1)[0]
    assert saved.windows[0]["models"][0]["partial"]
    model = problem.make_model()
    (problem.loss_of(model, *problem.make_batches(1)[0]) / windows.ACCUMULATION).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    actual = run_distributed(mean_gradient, 1, saved)[0]
    del expected["scale"], actual["scale"]  # so large that it overflows at the first loss scale
    assert problem.difference(actual, expected) < 2e-2


def closed_window_over_an_open_one(setup: Setup) -> list[str]:
    run = windows.Run(setup)
    run.go(3)
    saved = run.save()
    run.go(windows.MICRO_BATCHES)
    again = windows.Run(setup)
    again.go(2)
    again.load(saved)
    again.go(windows.MICRO_BATCHES)
    return windows.different(again.parameters(), run.parameters())


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (2, "zero=1"),
        pytest.param(2, "zero=2", marks=pytest.mark.exhaustive),
        (2, "zero=3"),
        (4, "zero=2 replicate=2"),
    ],
)
def test_a_closed_window_clears_the_one_that_is_open(run_distributed, world_size: int, parallel: str) -> None:
    assert run_distributed(closed_window_over_an_open_one, world_size, Setup(parallel)) == [[]] * world_size


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(problem.VOCABULARY, problem.VOCABULARY), nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.used(nn.functional.one_hot(tokens, problem.VOCABULARY).float())


def partly_used() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return PartlyUsed()


def test_sums_over_some_of_the_ranks_and_parameters_go_on_in_the_same_world(run_distributed) -> None:
    wrong = run_distributed(windows.go_on_and_compare, 4, Setup("zero=2 replicate=2"), make_model=partly_used)
    assert wrong == [[]] * 4


def mean_of_partly_used(saved: windows.Saved) -> dict[str, torch.Tensor]:
    run = windows.Run(Setup(), make_model=partly_used)
    run.load(saved)
    return {name: p.grad for name, p in run.plain.named_parameters() if p.grad is not None}


def save_partly_used() -> windows.Saved:
    run = windows.Run(Setup("zero=2 replicate=2"), make_model=partly_used)
    run.go(1)
    return run.save()


def test_such_sums_go_to_another_world(run_distributed) -> None:
    model = partly_used()
    (problem.loss_of(model, *problem.make_batches(1)[0]) / windows.ACCUMULATION).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    saved = run_distributed(save_partly_used, 4)[0]
    actual = run_distributed(mean_of_partly_used, 1, saved)[0]
    assert problem.difference(actual, expected) < 1e-6


def two_models(parallel: str) -> list[str]:
    """One loss through two models, with an optimizer each, one of which steps at every micro-batch."""

    def build() -> tuple[
        windows.Accelerator, list[nn.Module], list[torch.optim.Optimizer], windows.AccumulationState
    ]:
        accelerator = windows.Accelerator(cpu=True, parallel=parallel)
        models = [partly_used(), partly_used()]
        for model in models:
            model.unused.requires_grad_(False)
        optimizers = [torch.optim.SGD(model.used.parameters(), lr=0.1) for model in models]
        *both, first, second = accelerator.prepare(*models, *optimizers)
        return accelerator, both, [first, second], windows.window_of(accelerator)

    def go(built: tuple, numbers: range) -> dict[str, torch.Tensor]:
        accelerator, (first, second), (often, seldom), _ = built
        for number in numbers:
            tokens, labels = (
                part.chunk(accelerator.num_processes)[accelerator.process_index]
                for part in problem.make_batches(6)[number]
            )
            scores = first(tokens) + second(tokens)
            accelerator.backward(nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()))
            often.step()
            often.zero_grad()
            if number % 2:
                seldom.step()
                seldom.zero_grad()
        return {
            f"{i}.{name}": value
            for i, model in enumerate((first, second))
            for name, value in windows.portable(dict(plain(model).state_dict())).items()
        }

    def plain(model: nn.Module) -> nn.Module:
        return getattr(model, "module", model)

    run = build()
    weights = go(run, range(3))
    own = windows.portable(run[3].state_dict())
    assert [len(model["local"]) + len(model["reduced"]) for model in own["models"]] == [0, 2]
    states = windows.from_all_ranks(own, run[0])
    expected = go(run, range(3, 6))
    again = build()
    for i, model in enumerate(again[1]):
        prefix = f"{i}."
        plain(model).load_state_dict(
            {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        )
    again[3].load_state_dicts(states, again[0].process_index)
    return windows.different(go(again, range(3, 6)), expected)


@pytest.mark.parametrize("parallel", ["ddp", "zero=2"])
def test_an_optimizer_that_steps_seldom_goes_on_beside_one_that_steps_often(
    run_distributed, parallel: str
) -> None:
    assert run_distributed(two_models, 2, parallel) == [[], []]
