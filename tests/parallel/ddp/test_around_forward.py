"""Losses that do not come from a call of the prepared model: averaged as if they did."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep import Accelerator
from lockstep.errors import UsageError
from parallel.ddp import around_forward as problem
from tests.refusals import expect_refusal


@pytest.mark.parametrize(
    ("world_size", "parallel", "loops"),
    [
        (1, "ddp", problem.LOOPS),
        (4, "ddp", problem.LOOPS),
        (2, "zero=1", problem.ON_SHARDS),
        (2, "zero=3", problem.ON_SHARDS),
        (4, "zero=3 replicate=2", problem.ON_SHARDS),
    ],
)
def test_gradients_are_averaged_whatever_part_of_a_model_is_called(
    run_distributed: Any, world_size: int, parallel: str, loops: list[str]
) -> None:
    expected = problem.on_one(loops)
    for found in run_distributed(problem.on_ranks, world_size, loops, parallel):
        for loop in loops:
            for name, value in expected[loop].items():
                torch.testing.assert_close(
                    found[loop][name], value, atol=1e-6, rtol=1e-5, msg=f"{loop}: {name}"
                )


def reordered_and_frozen() -> None:
    accelerator = Accelerator(cpu=True)
    plain = problem.Net()
    model, _ = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 6)).sum())
    head = plain.head
    del plain.head
    plain.head = head
    plain.encoder.requires_grad_(False)
    expect_refusal(UsageError, "another order than in prepare()", model, torch.ones(2, 6))


def test_another_order_with_other_trainable_parameters_is_refused(run_distributed: Any) -> None:
    run_distributed(reordered_and_frozen, 2)


@pytest.mark.parametrize("world_size", [2])
def test_a_step_of_gradients_of_one_rank_is_refused_before_it_is_made(
    run_distributed: Any, world_size: int
) -> None:
    for found in run_distributed(problem.refusals, world_size):
        for way, words in problem.OWN.items():
            assert words in found.get(way.__name__, ""), way.__name__
