"""Parameters that differ among replicas are found, named and mended; equal ones never raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep import Accelerator, DamageChecks, DamageError
from lockstep.errors import ConfigError
from parallel import split_problem, zero_problem
from tests.refusals import expect_refusal

WEIGHT = "layers.1.up.weight"


def part(parameter: Any) -> torch.Tensor:
    """This rank's elements, as a view."""
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()


class Still:
    """A model whose steps change nothing, so that what was damaged can be mended exactly."""

    def __init__(self, parallel: str, every: int = 1) -> None:
        self.accelerator = Accelerator(
            cpu=True, parallel=parallel, kwargs_handlers=[DamageChecks(divergence_every=every)]
        )
        kind = split_problem.make_gpt if "tp" in parallel else zero_problem.make_model
        model = kind()
        with torch.no_grad():
            # Values that are equal could change places, and no check would see it.
            for parameter in model.parameters():
                parameter.view(-1).add_(torch.arange(parameter.numel()) / 4096)
        self.model, self.optimizer = self.accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.0)
        )
        self.rank = self.accelerator.process_index

    def bits(self, name: str) -> torch.Tensor:
        parameters = dict(self.accelerator.unwrap_model(self.model).named_parameters())
        return part(parameters[name]).view(torch.int32).view(-1)

    def step(self) -> str:
        """What the check says; "" if all is well."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        try:
            self.optimizer.step()
        except DamageError as error:
            return str(error)
        return ""


def damage(parallel: str, names: list[str], rank: int) -> list[tuple[str, list[str]]]:
    """For each name what is said of one ulp, of two elements in each other's place, and of a flip of each bit."""
    still, found = Still(parallel), []
    assert still.step() == ""
    for name in names:
        bits, said = still.bits(name), []

        def change(values: torch.Tensor, place: slice, bits: torch.Tensor = bits) -> str:
            before = bits.clone()
            if still.rank == rank:
                bits[place] = values
            message = still.step()
            bits.copy_(before)
            return message

        said.append(change(bits[3:4] + 1, slice(3, 4)))
        said.append(change(bits[[5, 4]], slice(4, 6)))
        said += [change(bits[7:8] ^ (-(2**31) if bit == 31 else 1 << bit), slice(7, 8)) for bit in range(32)]
        assert still.step() == ""
        found.append((name, said))
    return found


HELD = [
    # Ranks, parallel, where the damage is, the tensors, and who is said to differ from whom.
    (4, "ddp", 2, [WEIGHT, "embed.weight"], "rank 2 from ranks 0, 1, 3"),
    (4, "zero=3 replicate=2", 3, [WEIGHT], "ranks 1, 3 from each other"),
    (2, "tp=2", 1, ["norm.weight"], "ranks 0, 1 from each other"),  # what every rank has whole
    (4, "tp=2", 2, ["blocks.1.mlp.0.weight"], "ranks 0, 2 from each other"),
]


@pytest.mark.parametrize(("ranks", "parallel", "rank", "names", "blamed"), HELD)
def test_an_ulp_a_swap_and_a_flip_of_each_bit_are_named_by_tensor_and_rank(
    run_distributed: Any, ranks: int, parallel: str, rank: int, names: list[str], blamed: str
) -> None:
    for of_rank in run_distributed(damage, ranks, parallel, names, rank):
        for name, said in of_rank:
            assert len(said) == 34
            for step, message in enumerate(said):
                assert f"'{name}' differs at step " in message, step
                assert blamed in message
            assert "differs at step 2: " in said[0] or name != names[0]
            assert "; after step 1 it was the same." in said[0] or name != names[0]


def within(every: int, at: int) -> list[int]:
    """The steps after which a check says something, of damage in step ``at``."""
    still, found = Still("ddp", every), []
    for step in range(1, 3 * every + 1):
        if step == at and still.rank == 0:
            still.bits(WEIGHT)[0] += 1
        if still.step():
            found.append(step)
    return found


def test_damage_is_found_by_the_next_check(run_distributed: Any) -> None:
    assert run_distributed(within, 2, 4, 6) == [[8, 12]] * 2


class Tiny(torch.nn.Module):
    """Some layers, and a scalar, which ZeRO leaves whole on each rank."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.one, self.two = torch.nn.Linear(9, 33), torch.nn.Linear(33, 5)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).tanh()) * self.scale


def many_steps(parallels: list[str], steps: int) -> list[int]:
    """How many pieces were compared at each step, under each ``parallel``."""
    found = []
    for parallel in parallels:
        accelerator = Accelerator(
            cpu=True,
            parallel=parallel,
            split_batches=True,
            kwargs_handlers=[DamageChecks(divergence_every=1, bad_gradients="stop")],
        )
        is_split = "tp" in parallel
        model = split_problem.make_gpt(1) if is_split else Tiny()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        torch.manual_seed(accelerator.process_index)
        rows = split_problem.make_batches(8, 2)
        for step in range(steps):
            if is_split:
                loss = split_problem.loss_of("gpt", model, rows[step % 8])
            else:
                loss = model(torch.randn(4, 9)).square().mean()  # other rows on each rank
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        watch = accelerator._preparation._damage
        assert watch._checked == steps
        found.append(len(watch._divergence._shared.mine))
    return found


def test_many_steps_raise_no_false_alarm(run_distributed: Any) -> None:
    ddp, one, two, three, split = run_distributed(
        many_steps, 2, ["ddp", "zero=1", "zero=2", "zero=3", "tp=2"], 10
    )[0]
    assert ddp == 5
    assert one == two == three == 1  # the scalar, which each rank has; shards are on one rank each
    assert 0 < split < len(list(split_problem.make_gpt(1).parameters()))


def split(parallel: str, kind: str) -> int:
    """How many pieces this rank compares, in some steps without damage."""
    checks = DamageChecks(divergence_every=1, bad_gradients="stop")
    accelerator = Accelerator(cpu=True, parallel=parallel, split_batches=True, kwargs_handlers=[checks])
    model = split_problem.MODELS[kind](2)
    rows = DataLoader(split_problem.make_batches(8).flatten(0, 1), batch_size=split_problem.ROWS)
    model, optimizer, loader = accelerator.prepare(model, split_problem.make_optimizer(model), rows)
    for tokens in loader:
        accelerator.backward(split_problem.loss_of(kind, model, tokens))
        optimizer.step()
        optimizer.zero_grad()
    return len(accelerator._preparation._damage._divergence._shared.mine)


def test_stages_and_experts_are_compared_where_several_ranks_hold_them(run_distributed: Any) -> None:
    whole = dict(split_problem.make_gpt(2).named_parameters())
    stages = run_distributed(split, 4, "pp=2", "gpt")
    assert stages[:2] == stages[:1] * 2 and stages[2:] == stages[2:3] * 2
    assert stages[0] + stages[2] == len(whole) + 1  # the embedding is the head's weight: each stage has it
    experts = len(list(split_problem.make_experts().parameters()))
    assert run_distributed(split, 4, "ep=2", "experts") == [experts] * 4


def apart() -> str:
    still = Still("ddp")
    still.accelerator._preparation._damage._together = lambda: False
    if still.rank == 0:
        still.bits(WEIGHT)[0] += 1
    return still.step()


def test_ranks_that_train_by_themselves_may_differ(run_distributed: Any) -> None:
    assert run_distributed(apart, 2) == ["", ""]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence_every": -1}, "divergence_every is -1"),
        ({"divergence_every": True}, "divergence_every is True"),
        ({"max_skips": 1.5}, "max_skips is 1.5"),
        ({"bad_gradients": "skp"}, "Did you mean 'skip'?"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    expect_refusal(ConfigError, message, DamageChecks, **options)
