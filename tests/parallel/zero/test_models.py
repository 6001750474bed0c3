"""ZeRO under the scripts and models that people have: the numbers of plain torch on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep import Accelerator
from parallel import zero_problem as problem
from parallel.small_groups import groups_in_stage_3
from parallel.zero_scenarios import SCENARIOS, Plain
from tests.marks import again, needs_a_restart

WORDS = ("zero=1", "zero=2", "zero=3")


def check(actual: dict[str, Any], expected: dict[str, Any], where: object) -> None:
    assert actual.keys() == expected.keys(), where
    for name in expected:
        mine, theirs = (torch.as_tensor(found[name]).detach() for found in (actual, expected))
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), (where, name)
        if not mine.is_floating_point():
            assert torch.equal(mine, theirs), (where, name)
            continue
        error = problem.difference({name: mine}, {name: theirs})
        assert error < 1e-5, (where, name, error)


SOME_BYTES = 2**11
"""Several of the models have blocks of which a few fit into this."""


def run_scenario(name: str, parallel: str, accumulation: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, parallel=parallel, gradient_accumulation_steps=accumulation)
    with groups_in_stage_3(parallel, SOME_BYTES):
        return SCENARIOS[name](accelerator)


def run_stages(name: str, words: tuple[str, ...], accumulation: int) -> list[dict[str, Any]]:
    return [run_scenario(name, parallel, accumulation) for parallel in words]


CASES = [
    pytest.param(2, 1, WORDS, name, marks=[needs_a_restart] if name == "interrupted" else [])
    for name in SCENARIOS
] + [
    again(2, 3, WORDS, name)
    for name in (
        *("adversaries", "two_optimizers", "evaluation_everywhere"),
        *("odd_shapes", "kinds_of_models", "transformer"),
    )
]
CASES += [
    again(4, 3, ("zero=2 replicate=2", "zero=3"), name)
    for name in ("adversaries", "odd_shapes", "kinds_of_models", "clipping")
]


@pytest.mark.parametrize(("world_size", "accumulation", "words", "name"), CASES)
def test_a_script_gives_the_numbers_of_plain_torch(
    run_distributed, world_size: int, accumulation: int, words: tuple[str, ...], name: str
) -> None:
    torch.set_num_threads(1)
    expected = SCENARIOS[name](Plain(accumulation))
    for results in run_distributed(run_stages, world_size, name, words, accumulation):
        for parallel, actual in zip(words, results, strict=True):
            check(actual, expected, parallel)
