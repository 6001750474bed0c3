"""ZeRO under the scripts and models that people have: the numbers of plain torch on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep import Accelerator
from lockstep.errors import LockstepError
from parallel import zero_problem as problem
from parallel.small_groups import groups_in_stage_3
from parallel.zero_scenarios import SCENARIOS, Plain
from tests.frozen.verdicts import hold
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


def verdict_of(actual: dict[str, Any] | str, expected: dict[str, Any]) -> tuple[str, str]:
    if isinstance(actual, str):
        return "refused", actual
    try:
        check(actual, expected, "")
    except AssertionError as error:
        return "differs", str(error)
    return "equal", ""


SOME_BYTES = 2**11
"""Several of the models have blocks of which a few fit into this."""


def run_scenario(name: str, parallel: str, accumulation: int) -> dict[str, Any] | str:
    """What the script returns, or the message that refuses it."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, parallel=parallel, gradient_accumulation_steps=accumulation)
    try:
        with groups_in_stage_3(parallel, SOME_BYTES):
            return SCENARIOS[name](accelerator)
    except LockstepError as error:
        return str(error)


def run_stages(name: str, words: tuple[str, ...], accumulation: int) -> list[dict[str, Any] | str]:
    return [run_scenario(name, parallel, accumulation) for parallel in words]


CASES = [
    pytest.param(2, 1, WORDS, name, marks=[needs_a_restart] if name == "interrupted" else [])
    for name in SCENARIOS
] + [
    again(2, 3, WORDS, name)
    for name in (
        *("adversaries", "two_optimizers", "evaluation_everywhere"),
        *("odd_shapes", "kinds_of_models"),
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
    ranks = run_distributed(run_stages, world_size, name, words, accumulation)
    for parallel, *found in zip(words, *ranks, strict=True):
        case = f"{name} on {world_size} ranks, accumulation {accumulation}"
        verdicts = [verdict_of(actual, expected) for actual in found]
        hold(f"scripts, {parallel}", [{case: one} for one in verdicts])
        assert verdicts == [("equal", "")] * world_size, parallel


# -- two forwards before one backward --------------------------------------------------------------------


def discriminator() -> torch.nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.LeakyReLU(), torch.nn.Linear(8, 1)
        )


def pair(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, ...]:
    rows = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step))
    return tuple(one.chunk(ranks)[rank] for one in rows)


def loss_of_pair(model: Any, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    return (
        torch.nn.functional.softplus(-model(real)).mean() + torch.nn.functional.softplus(model(fake)).mean()
    )


def discriminated(parallel: str) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, parallel=parallel)
    model = discriminator()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for step in range(3):
        place = accelerator.process_index, accelerator.num_processes
        accelerator.backward(loss_of_pair(model, *pair(step, *place)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize(
    ("ranks", "parallel"), [(1, "zero=3"), (2, "zero=1"), (2, "zero=3"), (4, "zero=2 replicate=2")]
)
def test_batch_normalisation_runs_two_forwards_before_a_backward(
    run_distributed: Any, ranks: int, parallel: str
) -> None:
    # The mean of the ranks' gradients, each over its own rows; the statistics are those of rank 0's rows.
    model = discriminator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        for rank in reversed(range(ranks)):
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            (loss_of_pair(model, *pair(step, rank, ranks)) / ranks).backward()
            if rank:
                model.load_state_dict(buffers, strict=False)
        optimizer.step()
        optimizer.zero_grad()
    for found in run_distributed(discriminated, ranks, parallel):
        # After its last forward each rank has statistics of its own.
        expected = dict(model.named_parameters())
        check(
            {name: found[name] for name in expected}, {n: v.detach() for n, v in expected.items()}, parallel
        )
