"""Gradients that are not finite: all ranks skip the step or stop; rank, tensor and micro-step are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep import Accelerator, DamageChecks, DamageError, GradScalerKwargs
from lockstep.errors import UsageError
from lockstep.observe.damage import any_not_finite
from parallel import split_problem
from parallel import zero_problem as problem
from tests.refusals import expect_refusal

ACCUMULATION = 3


class Run:
    """A training in which one rank's gradients are spoilt in chosen backwards, counted from 0."""

    def __init__(
        self, parallel: str, checks: DamageChecks, spoilt: dict[int, float], rank: int = 1, **options: Any
    ) -> None:
        handlers = [checks, *options.pop("handlers", [])]
        self.accelerator = Accelerator(
            cpu=True,
            parallel=parallel,
            gradient_accumulation_steps=ACCUMULATION,
            step_scheduler_with_optimizer=True,
            kwargs_handlers=handlers,
            **options,
        )
        self.spoilt = spoilt if self.accelerator.process_index == rank else {}
        model = problem.make_model()
        optimizer = problem.make_optimizer("adamw", model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model.layers[1].register_forward_hook(self.spoil)
        self.backwards = 0
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)

    def spoil(self, module: Any, args: Any, output: torch.Tensor) -> None:
        factor = self.spoilt.get(self.backwards)
        if factor is not None and output.requires_grad:
            output.register_hook(lambda gradient: gradient * factor)

    def window(self, number: int) -> bool:
        """Train on the ``number``-th window; whether its step was skipped."""
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        batches = problem.make_batches(ACCUMULATION * (number + 1))[-ACCUMULATION:]
        for tokens, labels in batches:
            with self.accelerator.accumulate(self.model):
                own = tokens.chunk(world_size)[rank], labels.chunk(world_size)[rank]
                self.accelerator.backward(problem.loss_of(self.model, *own))
                self.backwards += 1
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self.accelerator.optimizer_step_was_skipped

    def state(self) -> list[torch.Tensor]:
        """Everything that a step may change on this rank."""
        values = [p for group in self.optimizer.param_groups for p in group["params"]]
        values += [
            value
            for p in list(values)
            for value in self.optimizer.state.get(p, {}).values()
            if isinstance(value, torch.Tensor)
        ]
        found = [(v.to_local() if hasattr(v, "to_local") else v).detach().clone() for v in values]
        return [*found, torch.tensor(self.scheduler.last_epoch)]

    def parameters(self) -> dict[str, torch.Tensor]:
        named = self.accelerator.unwrap_model(self.model).named_parameters()
        return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in named}


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


def spoilt_names() -> set[str]:
    """Which gradients a NaN at the output of the block reaches, in plain torch."""
    model = problem.make_model()
    model.layers[1].register_forward_hook(lambda *a: a[2].register_hook(lambda g: g * float("nan")) and None)
    problem.loss_of(model, *problem.make_batches(1)[0]).backward()
    return {n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()}


def skip(parallel: str) -> tuple[list[bool], bool, bool, dict[str, torch.Tensor]]:
    """Windows that were skipped, whether window 1 changed anything, and window 2 did; parameters in the end."""
    run = Run(parallel, DamageChecks(bad_gradients="skip"), {ACCUMULATION + 1: float("nan")})
    skipped = [run.window(0)]
    states = [run.state()]
    for number in (1, 2):
        skipped.append(run.window(number))
        states.append(run.state())
    return skipped, same(states[0], states[1]), same(states[1], states[2]), run.parameters()


def plainly(windows: tuple[int, ...]) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    model = problem.make_model()
    optimizer = problem.make_optimizer("adamw", model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for number in windows:
        for batch in problem.make_batches(ACCUMULATION * (number + 1))[-ACCUMULATION:]:
            (problem.loss_of(model, *batch) / ACCUMULATION).backward()
        optimizer.step()
        for _ in range(2):  # the schedule counts the batches of two ranks
            scheduler.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("parallel", ["ddp", "zero=1", "zero=3"])
def test_a_skipped_step_leaves_no_trace_on_any_rank(run_distributed: Any, parallel: str) -> None:
    expected = plainly((0, 2))
    for skipped, untouched, stuck, parameters in run_distributed(skip, 2, parallel):
        assert skipped == [False, True, False]
        assert untouched
        assert not stuck
        assert problem.difference(parameters, expected) < 1e-5


def stop(parallel: str, factor: float) -> tuple[str, bool]:
    run = Run(parallel, DamageChecks(bad_gradients="stop"), {ACCUMULATION + 1: factor})
    run.window(0)
    before = run.state()
    try:
        run.window(1)
    except DamageError as error:
        return str(error), same(before, run.state())
    return "", False


@pytest.mark.parametrize(("parallel", "kind"), [("ddp", "NaN"), ("zero=2", "Inf"), ("zero=3", "NaN")])
def test_the_rank_its_tensors_and_the_micro_step_are_named(
    run_distributed: Any, parallel: str, kind: str
) -> None:
    affected = spoilt_names()
    for message, untouched in run_distributed(stop, 2, parallel, float(kind)):
        assert message.startswith("Gradients of step 2 are not finite: rank 1 has ")
        assert untouched
        assert "in micro-step 2 of 3. No rank made the step" in message
        assert "rank 0" not in message
        named = set(message.split("'")[1:6:2])
        assert len(named) == 3
        assert named <= affected
        if kind == "NaN":
            assert f"has NaN in '{min(named, key=message.index)}'" in message
            assert f"and {len(affected) - 3} more in" in message


def one_bad_row() -> tuple[bool, bool, bool]:
    """Whether the step was skipped, this rank's shard has a bad gradient, and its weights changed."""
    accelerator = Accelerator(
        cpu=True, parallel="zero=3", kwargs_handlers=[DamageChecks(bad_gradients="skip")]
    )
    model = torch.nn.Linear(4, 4, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    output = model(torch.ones(2, 4))
    output.register_hook(lambda g: torch.cat((g[:, :1] * float("nan"), g[:, 1:]), 1))
    accelerator.backward(output.sum())
    before = model.weight.to_local().detach().clone()
    is_bad = not model.weight.grad.to_local().isfinite().all()
    optimizer.step()
    changed = not torch.equal(before, model.weight.to_local())
    return accelerator.optimizer_step_was_skipped, is_bad, changed


def test_a_rank_whose_shard_is_good_skips_with_the_one_whose_shard_is_bad(run_distributed: Any) -> None:
    assert run_distributed(one_bad_row, 2) == [(True, True, False), (True, False, False)]


def bad_loss_of_split_model() -> str:
    accelerator = Accelerator(cpu=True, parallel="tp=2", kwargs_handlers=[DamageChecks(bad_gradients="stop")])
    model = split_problem.make_gpt(1)
    model, optimizer = accelerator.prepare(model, split_problem.make_optimizer(model))
    loss = split_problem.loss_of("gpt", model, split_problem.make_batches(1)[0])
    accelerator.backward(loss * (float("nan") if accelerator.process_index == 1 else 1.0))
    try:
        optimizer.step()
    except DamageError as error:
        return str(error)
    return ""


def test_of_ranks_that_share_a_model_the_one_with_the_bad_loss_stands_first(run_distributed: Any) -> None:
    for message in run_distributed(bad_loss_of_split_model, 2):
        assert message.startswith("Gradients of step 1 are not finite: rank 1 has NaN in ")
        assert " and in its loss; rank 0 has NaN in " in message


def windows_of(run: Run, count: int) -> tuple[list[bool], str]:
    """Which windows were skipped, and what ended the run."""
    skipped = []
    try:
        for number in range(count):
            skipped.append(run.window(number))
    except DamageError as error:
        return skipped, str(error)
    return skipped, ""


def always_bad(max_skips: int) -> tuple[list[bool], str]:
    checks = DamageChecks(bad_gradients="skip", max_skips=max_skips)
    good = range(2 * ACCUMULATION, 3 * ACCUMULATION)
    return windows_of(Run("ddp", checks, {n: float("nan") for n in range(60) if n not in good}), 10)


def test_too_many_skips_in_a_row_stop_all_ranks(run_distributed: Any) -> None:
    for skipped, message in run_distributed(always_bad, 2, 3):
        assert skipped == [True, True, False, True, True, True]  # the good one in between begins anew
        assert "Gradients of step 7 are not finite: rank 1 has NaN in" in message
        assert "after 3 steps in a row that were skipped" in message


def with_loss_scale(spoilt: dict[int, float], scale: float) -> tuple[list[bool], str]:
    checks, handlers = DamageChecks(bad_gradients="stop"), [GradScalerKwargs(init_scale=scale)]
    return windows_of(Run("ddp", checks, spoilt, mixed_precision="fp16", handlers=handlers), 5)


def test_overflows_are_the_loss_scalers_until_the_scale_is_below_one(run_distributed: Any) -> None:
    for found in run_distributed(with_loss_scale, 2, {1: float("inf")}, 1024.0):
        assert found == ([True, False, False, False, False], "")
    always = {n: float("nan") for n in range(60)}
    for skipped, message in run_distributed(with_loss_scale, 2, always, 4.0):
        assert skipped == [True, True]  # scales 4 and 2; at 1 nothing is left to halve
        assert "Gradients of step 3 are not finite: rank 1 has NaN in" in message


def test_one_process_without_ranks_skips_too() -> None:
    run = Run("ddp", DamageChecks(bad_gradients="skip"), {1: float("nan")}, rank=0)
    before = run.state()[: len(list(run.model.parameters()))]
    assert run.window(0)
    assert same(before, run.state()[: len(before)])
    assert not run.window(1)


@pytest.mark.parametrize(
    ("values", "dtype", "is_bad"),
    [
        ([1e30, -3e38], torch.float32, False),  # finite, though their squares are not
        ([65504.0] * 9, torch.float16, False),
        ([3e38, 1.0], torch.bfloat16, False),
        ([], torch.float32, False),
        ([1.0, float("-inf")], torch.float32, True),
        ([float("nan")], torch.float16, True),
        ([1e30, float("nan")], torch.float64, True),
    ],
)
def test_only_what_is_not_finite_is_bad(values: list[float], dtype: torch.dtype, is_bad: bool) -> None:
    parameters = [
        torch.nn.Parameter(torch.zeros(len(values), dtype=dtype)),
        torch.nn.Parameter(torch.ones(2)),
    ]
    parameters[0].grad = torch.tensor(values, dtype=dtype)
    assert any_not_finite(torch.optim.SGD(parameters, lr=1.0), None) is is_bad


def test_sparse_gradients_are_looked_at() -> None:
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    for factor, is_bad in ((1.0, False), (float("nan"), True)):
        optimizer.zero_grad()
        (embedding(torch.tensor([3])).sum() * factor).backward()
        assert any_not_finite(optimizer, None) is is_bad


def test_a_closure_is_refused() -> None:
    run = Run("ddp", DamageChecks(bad_gradients="stop"), {}, rank=0)
    expect_refusal(UsageError, "DamageChecks", run.optimizer.step, lambda: 0.0)
