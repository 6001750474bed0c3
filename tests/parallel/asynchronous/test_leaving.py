"""Bad arguments, models that cannot be trained so, and ranks that leave early: errors on all ranks, nobody waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Accelerator, BoundedStaleness, DiLoCo, LocalSGD
from parallel.asynchronous import problem

BLOCKS = {
    "local": lambda accelerator, model, optimizer: LocalSGD(accelerator, model, 3),
    "diloco": lambda accelerator, model, optimizer: DiLoCo(accelerator, model, 3),
    "stale": lambda accelerator, model, optimizer: BoundedStaleness(accelerator, model, optimizer, 2),
}


def message(make: Callable[[], Any]) -> str:
    try:
        make()
    except Exception as error:
        return problem.message_of(error)
    return "nothing was raised"


def refusals() -> dict[str, str]:
    accelerator = Accelerator(cpu=True)
    plain, stranger = problem.make_plain_model(), nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(plain, problem.make_sgd(plain))
    second = accelerator.process_index == 1
    local, diloco = partial(LocalSGD, accelerator), partial(DiLoCo, accelerator)
    stale = partial(BoundedStaleness, accelerator)
    frozen = accelerator.prepare(nn.Linear(2, 2).requires_grad_(False))
    whole = LocalSGD(accelerator, model, 3)
    attempts: dict[str, Callable[[], Any]] = {
        "no steps": lambda: local(model, 0),
        "half a step": lambda: diloco(model, 1.5),
        "no steps on one rank": lambda: local(model, 0 if second else 3),
        "other steps on one rank": lambda: local(model, 2 if second else 3),
        "negative": lambda: stale(model, optimizer, -1),
        "yes": lambda: stale(model, optimizer, True),
        "no norm": lambda: stale(model, optimizer, 1, max_norm=0.0),
        "no model": lambda: local(None, 3),
        "not prepared": lambda: local(plain, 3),
        "frozen": lambda: local(frozen, 3),
        "no optimizer": lambda: stale(model, None, 1),
        "other optimizer": lambda: stale(model, problem.make_sgd(stranger), 1),
        "no outer optimizer": lambda: diloco(model, 3, 0.7),
        "builds none": lambda: diloco(model, 3, lambda parameters: parameters),
        "outside": whole.step,
        "outside stale": stale(model, optimizer, 1).step,
        "complex": lambda: local(accelerator.prepare(Complex()), 3),
    }
    found = {name: message(attempt) for name, attempt in attempts.items()}
    with whole:
        found["twice"] = message(whole.__enter__)
    return found


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Parameter(torch.ones(2))
        self.register_parameter(
            "wave", nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)
        )


EXPECTED = {
    "no steps": "ConfigError: LocalSGD got a number of steps=0. Pass a whole number of 1 or more.",
    "half a step": "ConfigError: DiLoCo got a number of steps=1.5. Pass a whole number",
    "no steps on one rank": "got a number of steps=0",
    "other steps on one rank": "UsageError: Ranks exchanged data at different places: rank 0 LocalSGD(steps=3",
    "negative": "ConfigError: BoundedStaleness got staleness=-1. Pass a whole number of 0 or more.",
    "yes": "ConfigError: BoundedStaleness got staleness=True.",
    "no norm": "ConfigError: BoundedStaleness got max_norm=0.0",
    "no model": "UsageError: LocalSGD got a NoneType. Pass the model that prepare() returned.",
    "not prepared": "UsageError: LocalSGD got a Sequential that is not a data parallel replica",
    "frozen": "UsageError: LocalSGD got a Linear that is not a data parallel replica",
    "no optimizer": "UsageError: BoundedStaleness got a NoneType as optimizer.",
    "other optimizer": "UsageError: The optimizer trains 2 parameters of another model",
    "no outer optimizer": "UsageError: DiLoCo got outer_optimizer=0.7, which does not return an optimizer.",
    "builds none": "which does not return an optimizer.",
    "outside": "UsageError: LocalSGD.step was called outside of its block.",
    "outside stale": "UsageError: BoundedStaleness was used outside of its block.",
    "complex": "UsageError: LocalSGD averages real numbers",
    "twice": "UsageError: LocalSGD was entered twice.",
}


def test_bad_arguments_and_models_are_refused_on_all_ranks(run_distributed) -> None:
    for found in run_distributed(refusals, 2):
        assert found.keys() == EXPECTED.keys()
        assert [name for name in found if EXPECTED[name] not in found[name]] == [], found


def refuse_sharded() -> list[str]:
    accelerator = Accelerator(cpu=True, parallel="zero=2")
    model = problem.make_plain_model()
    model, optimizer = accelerator.prepare(model, problem.make_sgd(model))
    return [message(partial(make, accelerator, model, optimizer)) for make in BLOCKS.values()]


def refuse_half() -> str:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = problem.make_plain_model()
    model, optimizer = accelerator.prepare(model, problem.make_sgd(model))
    return message(lambda: BoundedStaleness(accelerator, model, optimizer, 1))


def test_sharded_models_and_loss_scales_are_refused(run_distributed) -> None:
    for messages in run_distributed(refuse_sharded, 2):
        assert all("UsageError" in one and "is sharded by ZeRO" in one for one in messages), messages
    assert all("loss scale of another step" in one for one in run_distributed(refuse_half, 2))


def leave_early(kind: str, at: int, how: str) -> tuple[str, float]:
    """Rank 1 raises before its step ``at``, or just ends; what each rank says, and the sum of a later collective."""
    accelerator = Accelerator(cpu=True)
    model = problem.make_plain_model()
    model, optimizer = accelerator.prepare(model, problem.make_sgd(model))
    rank = accelerator.process_index

    def train() -> None:
        with BLOCKS[kind](accelerator, model, optimizer) as block:
            for number in range(7):
                if rank == 1 and number == at:
                    if how == "ends":
                        break
                    time.sleep(0.05)  # the others are ahead by now
                    raise ValueError(f"bad batch {number}.")
                accelerator.backward(problem.loss_of(model, rank, number))
                if kind == "stale":
                    block.step()
                else:
                    optimizer.step()
                    block.step()
                optimizer.zero_grad()

    said = message(train)
    assert model.require_backward_grad_sync  # the block was left
    return said, accelerator.reduce(torch.tensor(1.0 + rank), "sum").item()


@pytest.mark.parametrize("kind", BLOCKS)
def test_an_exception_on_one_rank_reaches_the_others_and_nobody_hangs(run_distributed, kind: str) -> None:
    for at in (0, 4, 5):
        (other, total), (own, _) = run_distributed(leave_early, 2, kind, at, "raises")
        assert own == f"ValueError: bad batch {at}."
        assert other.startswith("LockstepError: Rank 1 left ")
        assert f"after {at} steps" in other
        if kind != "stale":
            assert f"ValueError: bad batch {at}." in other
        assert total == 3.0


@pytest.mark.parametrize("kind", BLOCKS)
def test_ranks_that_make_different_numbers_of_steps_all_raise(run_distributed, kind: str) -> None:
    for at in (4, 6):
        (other, total), (own, _) = run_distributed(leave_early, 2, kind, at, "ends")
        for said in (own, other):
            assert said.startswith("UsageError: Rank")
            assert f"after {at} steps" in said
            assert "even_batches=True" in said
        assert total == 3.0


def late_gradients() -> str:
    """A parameter that is unfrozen inside of the block, on rank 0 alone."""
    accelerator = Accelerator(cpu=True)
    model = problem.make_plain_model()
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)

    def train() -> None:
        with BoundedStaleness(accelerator, model, optimizer, 1) as stale:
            for number in range(4):
                if number == 2 and accelerator.process_index == 0:
                    model.module[2].bias.requires_grad_(True)
                accelerator.backward(problem.loss_of(model, accelerator.process_index, number))
                stale.step()
                optimizer.zero_grad()

    return message(train)


def test_a_parameter_that_is_unfrozen_inside_is_named(run_distributed) -> None:
    own, other = run_distributed(late_gradients, 2)
    assert "UsageError: 'module.2.bias' and 0 other parameters got gradients" in own
    assert "LockstepError: Rank 0 left BoundedStaleness with an exception after 2 steps" in other
