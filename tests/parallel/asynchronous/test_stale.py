"""BoundedStaleness against synchronous training, and against late gradients simulated by hand."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Accelerator, BoundedStaleness
from lockstep.parallel.asynchronous import StalenessReport
from parallel.asynchronous import problem
from parallel.asynchronous.problem import Tensors
from train import problems


def train(
    staleness: int,
    steps: int,
    enabled: bool = True,
    accumulation: int = 1,
    max_norm: float | None = None,
    naps_s: tuple[float, ...] = (0.0,),
) -> dict[str, Any]:
    """With a schedule; ranks nap in turn, each before another step."""
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulation, step_scheduler_with_optimizer=False
    )
    model = problem.make_plain_model()
    optimizer = problem.make_sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rank = accelerator.process_index
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block = BoundedStaleness(accelerator, model, optimizer, staleness, max_norm=max_norm, enabled=enabled)
        with accelerator.communication() as counter, block as stale:
            for number in range(steps * accumulation):
                time.sleep(naps_s[(number + 2 * rank) % len(naps_s)])
                with accelerator.accumulate(model):
                    accelerator.backward(problem.loss_of(model, rank, number))
                    stale.step()
                    if accelerator.sync_gradients:
                        scheduler.step()
                    optimizer.zero_grad()
    return {
        "end": problem.tensors(model),
        "momentum": [state["momentum_buffer"] for state in optimizer.state.values()],
        "report": stale.report,
        "schedule": list(stale.recent),
        "operations": {record.operation for record in counter.records if record.payload_bytes > 64},
        "learning_rate": optimizer.param_groups[0]["lr"],
    }


def simulate(schedule: list[list[int]], accumulation: int = 1, max_norm: float | None = None) -> Tensors:
    """Update t is the mean gradient of all ranks, each taken at the parameters of as many updates before as noted."""
    model = problem.make_plain_model()
    optimizer = problem.make_sgd(model)
    versions = [problem.tensors(model)]
    for t, staleness in enumerate(schedule):
        total: Tensors = {}
        for rank, stale in enumerate(staleness):
            model.load_state_dict(versions[t - stale])
            optimizer.zero_grad()
            for i in range(accumulation):
                (problem.loss_of(model, rank, t * accumulation + i) / accumulation).backward()
            for name, gradient in problems.gradients(model).items():
                total[name] = total.get(name, 0) + gradient / len(staleness)
        model.load_state_dict(versions[t])
        for name, parameter in model.named_parameters():
            parameter.grad = total[name]
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.param_groups[0]["lr"] = problem.LEARNING_RATE * 0.8**t
        optimizer.step()
        versions.append(problem.tensors(model))
    return versions[-1]


@pytest.mark.parametrize(("accumulation", "max_norm"), [(1, None), (2, 0.3)])
def test_without_staleness_it_is_synchronous_training(
    run_distributed, accumulation: int, max_norm: float | None
) -> None:
    steps = 6
    stale = run_distributed(train, 2, 0, steps, True, accumulation, max_norm)
    synchronous = run_distributed(train, 2, 0, steps, False, accumulation, max_norm)
    assert problem.are_equal([result["end"] for result in stale])
    assert problem.distance(stale[0]["end"], synchronous[0]["end"]) < 1e-6
    assert problem.distance(stale[0]["end"], simulate([[0, 0]] * steps, accumulation, max_norm)) < 1e-6
    report = stale[0]["report"]
    assert dict(report.histogram) == {0: 2 * steps}
    assert report.maximum == report.mean == 0
    assert synchronous[0]["report"].gradients == 0
    # Gradients go point to point alone.
    assert stale[0]["operations"] == {"send", "recv"}
    assert synchronous[0]["operations"] == {"all_reduce"}


@pytest.mark.parametrize(
    ("world_size", "staleness", "accumulation"), [(2, 1, 1), (2, 3, 2), (4, 2, 1)], ids=str
)
def test_updates_are_those_of_late_gradients_applied_by_hand(
    run_distributed, world_size: int, staleness: int, accumulation: int
) -> None:
    steps = 9
    naps = (0.03, 0.0, 0.0, 0.01, 0.0)
    results = run_distributed(train, world_size, staleness, steps, True, accumulation, naps_s=naps)
    schedule = results[0]["schedule"]
    assert len(schedule) == steps  # every round once, with a gradient of every rank
    assert all(len(ages) == world_size for ages in schedule)
    assert all(result["schedule"] == schedule for result in results)
    assert 0 < max(map(max, schedule)) <= staleness
    assert problem.are_equal([result["end"] for result in results])
    assert all(
        torch.equal(mine, first)
        for result in results
        for mine, first in zip(result["momentum"], results[0]["momentum"], strict=True)
    )
    assert problem.distance(results[0]["end"], simulate(schedule, accumulation)) < 1e-6
    flat = [age for ages in schedule for age in ages]
    report = results[0]["report"]
    assert dict(report.histogram) == {age: flat.count(age) for age in sorted(set(flat))}
    assert report.maximum == max(flat)
    # The scheduler is where a plain loop leaves it.
    assert results[0]["learning_rate"] == pytest.approx(problem.LEARNING_RATE * 0.8**steps)
    # A round sends the message to the server from all others, and back: gradients, one number for each parameter
    # whether it has one, and two for each rank; one round more says that all have ended.
    parameters = list(problem.make_plain_model().parameters())
    message = 4 * (sum(p.numel() for p in parameters) + len(parameters) + 2 * world_size)
    sent = sum(result["report"].bytes_sent for result in results)
    assert sent == (steps + 1) * 2 * (world_size - 1) * message


def run_ahead(staleness: int, folder: Path, begun: int, steps: int) -> dict[str, Any]:
    """Rank 1 stops before its step ``begun`` until rank 0 has computed ``staleness`` gradients more than it."""
    accelerator, model, optimizer = problem.prepared(problem.make_plain_model())
    rank = accelerator.process_index
    waits: list[int] = []
    with BoundedStaleness(accelerator, model, optimizer, staleness) as stale:
        for number in range(steps):
            if rank == 1 and number == begun:
                problem.wait_for(folder / "ahead")
            accelerator.backward(problem.loss_of(model, rank, number))
            if rank == 0 and number == begun + staleness:
                waits.append(stale.report.waits)
                missing = stale.updates_missing
                (folder / "ahead").touch()
            stale.step()
            optimizer.zero_grad()
        waits.append(stale.report.waits)
    return {
        "waits": waits,
        "missing": missing if rank == 0 else None,
        "schedule": list(stale.recent),
        "end": problem.tensors(model),
    }


@pytest.mark.parametrize(("staleness", "begun"), [(3, 0), (2, 0), (3, 5)])
def test_a_rank_goes_on_by_the_bound_while_another_stands_still(
    run_distributed, tmp_path: Path, staleness: int, begun: int
) -> None:
    ahead, behind = run_distributed(run_ahead, 2, staleness, tmp_path, begun, 10)
    # That the run ended at all shows it: rank 1 went on only once rank 0 was so far ahead.
    assert ahead["missing"] == staleness
    assert ahead["schedule"][begun + staleness][0] == staleness
    assert max(map(max, ahead["schedule"])) == staleness
    if begun == 0:
        assert ahead["waits"][0] == 0  # no update was there to wait for, nor needed
        assert ahead["waits"][1] > 0  # but the step after it was too far ahead
    assert problem.are_equal([ahead["end"], behind["end"]])


class Branches(nn.Module):
    """A layer that one rank alone uses, one that none uses, a frozen one, and numbers of 16 and 64 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(4, 4) for _ in range(3))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.narrow = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        self.seen += 1 + rank
        x = self.frozen(self.always(x)) * self.wide.float()
        x = self.sometimes(x) if rank == 1 else x
        # Gradients 1 and 2 are exact in 16 bits.
        return x.square().mean() + (1 + rank) * self.narrow.float().sum()


def branches() -> Branches:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Branches()


def branches_loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return model(torch.randn(3, 4, generator=generator), rank)


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, weight_decay=0.1)


def train_branches() -> Tensors:
    accelerator, model, optimizer = problem.prepared(branches(), decayed)
    with BoundedStaleness(accelerator, model, optimizer, 0) as stale:
        for number in range(3):
            accelerator.backward(branches_loss(model, accelerator.process_index, number))
            stale.step()
            optimizer.zero_grad()
    return problem.tensors(model)


def test_unused_frozen_and_mixed_parameters_are_stepped_as_in_one_process(run_distributed) -> None:
    ends = run_distributed(train_branches, 2)
    model = branches()
    before = problem.tensors(model)
    optimizer = decayed(model)
    for number in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (branches_loss(model, rank, number) / 2).backward()
        optimizer.step()
    model.seen = torch.tensor((3 * 1 + 3 * 2) / 2)  # the mean of the ranks'
    assert problem.are_equal(ends)
    assert problem.distance(ends[0], problem.tensors(model)) < 1e-6
    assert torch.equal(ends[0]["never.weight"], before["never.weight"])  # not even decayed
    assert not torch.equal(ends[0]["sometimes.weight"], before["sometimes.weight"])


def save_and_go_on(folder: Path, resumed: bool) -> Tensors:
    """Save after 4 of 9 steps, in which the block goes on; or load that and make the last 5."""
    accelerator, model, optimizer = problem.prepared(problem.make_plain_model())
    if resumed:
        accelerator.load_state(folder)
    with BoundedStaleness(accelerator, model, optimizer, 0) as stale:
        for number in range(4 if resumed else 0, 9):
            problem.learn(accelerator, model, optimizer, stale, number)
            if number == 3:
                stale.synchronize()
                assert stale.updates_missing == 0
                accelerator.save_state(folder)
    return problem.tensors(model)


def test_a_state_saved_after_synchronize_goes_on_bit_for_bit(run_distributed, tmp_path: Path) -> None:
    ends = [*run_distributed(save_and_go_on, 2, tmp_path / "state", False)]
    assert problem.are_equal(ends + run_distributed(save_and_go_on, 2, tmp_path / "state", True))


def late_save() -> list[Any]:
    accelerator, model, optimizer = problem.prepared(problem.make_plain_model())
    found: list[Any] = []
    for _ in range(2):  # a block may be entered again
        with BoundedStaleness(accelerator, model, optimizer, 3) as stale:
            for number in range(5):
                problem.learn(accelerator, model, optimizer, stale, number)
            stale.synchronize()
            found.append(problem.tensors(model))
            accelerator.wait_for_everyone()
        stale.finish()  # a second time: nothing
        assert torch.equal(found[-1]["0.weight"], problem.tensors(model)["0.weight"])
    return found


def test_all_ranks_are_equal_after_synchronize(run_distributed) -> None:
    first, second = run_distributed(late_save, 2)
    for mine, other in zip(first, second, strict=True):
        assert problem.are_equal([mine, other])


def test_a_report_counts() -> None:
    report = StalenessReport(2, {0: 3, 1: 2, 2: 1}, waits=3, bytes_sent=100)
    assert (report.gradients, report.maximum, report.mean) == (6, 2, 4 / 6)
    assert str(report) == (
        "6 gradients, staleness at most 2 (bound 2), mean 0.67 (0: 50%, 1: 33%, 2: 17%); 3 waits"
    )


def tensor_learning_rate() -> bool:
    """Whether an optimizer whose learning rate is a tensor still has that same tensor afterwards."""
    rate = torch.tensor(0.1)
    accelerator, model, optimizer = problem.prepared(
        problem.make_plain_model(), lambda model: torch.optim.Adam(model.parameters(), lr=rate, foreach=False)
    )
    held = optimizer.param_groups[0]["lr"]
    with BoundedStaleness(accelerator, model, optimizer, 1) as stale:
        for number in range(3):
            problem.learn(accelerator, model, optimizer, stale, number)
    return optimizer.param_groups[0]["lr"] is held


def test_a_learning_rate_that_is_a_tensor_stays_the_one_that_a_schedule_fills(run_distributed) -> None:
    assert run_distributed(tensor_learning_rate, 2) == [True, True]
