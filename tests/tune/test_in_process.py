"""``find_batch_size``: the same answer on all ranks, and no trace of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep import Accelerator, find_batch_size
from lockstep.errors import UsageError
from lockstep.runtime import rng_state
from lockstep.tune import SizeVerdict

RunDistributed = Callable[..., list[Any]]


class Counts(nn.Module):
    """Has something of everything that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1)
        self.leave = nn.Linear(16, 1)
        self.calls = 0
        self.last: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        self.last = rows.detach().mean(0)
        hidden: Tensor = self.leave(self.drop(self.norm(self.enter(rows))))
        return hidden


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.randn(8, 8))


def made(optimizer: str = "AdamW", parallel: str = "ddp") -> tuple[Accelerator, Any, Any, DataLoader[Any]]:
    accelerator = Accelerator(cpu=True, parallel=parallel, gradient_accumulation_steps=2)
    torch.manual_seed(3)
    plain, data = Counts(), TensorDataset(torch.randn(48, 8))
    kind = getattr(torch.optim, optimizer)
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    model, prepared = accelerator.prepare(plain, kind(plain.parameters(), lr=0.01, **options))
    return accelerator, model, prepared, DataLoader(data, batch_size=4, shuffle=True)


def loss_where(fails_above: int, on_rank: int, rank: int) -> Callable[[Any, Any], Tensor]:
    def loss_of(model: Any, batch: list[Tensor]) -> Tensor:
        if len(batch[0]) > fails_above and rank == on_rank:
            raise torch.OutOfMemoryError(f"out of memory at {len(batch[0])} rows")
        loss: Tensor = model(batch[0]).square().mean()
        return loss

    return loss_of


def everything(model: Any, optimizer: Any, accelerator: Accelerator) -> dict[str, Any]:
    plain = accelerator.unwrap_model(model)
    return copy.deepcopy(
        {
            "weights": plain.state_dict(),
            "gradients": [parameter.grad for parameter in plain.parameters()],
            "optimizer": optimizer.optimizer.state_dict(),
            "numbers": (plain.calls, plain.last, plain.training),
            "generators": {
                name: value.tolist() if isinstance(value, Tensor) else value
                for name, value in rng_state().items()
            },
            "step": (accelerator.sync_gradients, accelerator.gradient_accumulation_steps),
        }
    )


def around(steps_before: int, optimizer_name: str, finds: bool) -> tuple[Any, ...]:
    """What there is before and after, and at the end of some more steps."""
    accelerator, model, optimizer, loader = made(optimizer_name)
    batches = accelerator.prepare(loader)

    def train(count: int) -> None:
        for _, (rows,) in zip(range(count), batches, strict=False):
            with accelerator.accumulate(model):
                accelerator.backward(model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()

    train(steps_before)
    before = everything(model, optimizer, accelerator)
    other = DataLoader(loader.dataset, batch_size=4, shuffle=True)
    loss_of = loss_where(4, accelerator.num_processes - 1, accelerator.process_index)
    found = find_batch_size(accelerator, model, optimizer, other, loss_of) if finds else None
    after = everything(model, optimizer, accelerator)
    train(5)
    return before, after, everything(model, optimizer, accelerator), found


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("before", "optimizer"), [(0, "AdamW"), (3, "AdamW"), (4, "SGD"), (2, "Adagrad")])
def test_ranks_decide_alike_and_nothing_is_left_of_it(
    run_distributed: RunDistributed, ranks: int, before: int, optimizer: str
) -> None:
    results = run_distributed(around, ranks, before, optimizer, True)
    plain = run_distributed(around, ranks, before, optimizer, False)
    answers = set()
    for (state, after, end, found), (_, _, expected, _) in zip(results, plain, strict=True):
        assert equal(state, after)
        assert equal(end, expected)
        verdicts = {one.micro_batch: one.verdict for one in found.trials}
        assert verdicts == {2: SizeVerdict.FITS, 4: SizeVerdict.FITS, 8: SizeVerdict.OUT_OF_MEMORY}
        assert f"rank {ranks - 1}: OutOfMemoryError" in found.trials[-1].why
        assert (found.micro_batch, found.accumulation, found.global_batch) == (4, 2, 8 * ranks)
        answers.add(found)
    assert len(answers) == 1


def refusals() -> list[str]:
    accelerator, model, optimizer, loader = made()
    iterable = DataLoader(Stream(), batch_size=4)
    loss_of = loss_where(100, 0, 0)
    cases: list[tuple[Any, ...]] = [
        (optimizer.optimizer, loader, loss_of, {}),
        (optimizer, iterable, loss_of, {}),
        (optimizer, accelerator.prepare(loader), loss_of, {}),
        (optimizer, loader, loss_of, {"global_batch": accelerator.num_processes + 1}),
        (optimizer, loader, loss_where(0, accelerator.num_processes - 1, accelerator.process_index), {}),
        (optimizer, loader, lambda model, batch: model(batch), {}),
        (optimizer, loader, loss_of, {"memory_limit": "1KB"}),
    ]
    said = []
    for one, other, loss, options in cases:
        with pytest.raises(UsageError) as caught:
            find_batch_size(accelerator, model, one, other, loss, **options)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("ranks", [2])
def test_what_cannot_be_tried_is_refused_on_all_ranks(run_distributed: RunDistributed, ranks: int) -> None:
    expected = [
        "an optimizer that was not prepared (AdamW)",
        "Stream is iterable",
        "a loader that was prepared",
        "A global batch of 3 rows does not divide by 2 ranks",
        "No micro-batch fits, down to 1 (rank 0: ValueError: Expected more than 1 value per channel",
        "loss_of failed on rank 0: AttributeError",
        "No micro-batch fits, down to 1",
    ]
    for said in run_distributed(refusals, ranks):
        assert len(said) == len(expected)
        for text, part in zip(said, expected, strict=True):
            assert part in text


def refused_under(parallel: str) -> str:
    accelerator, model, optimizer, loader = made(parallel=parallel)
    with pytest.raises(UsageError) as caught:
        find_batch_size(accelerator, model, optimizer, loader, loss_where(100, 0, 0))
    return str(caught.value)


@pytest.mark.parametrize("parallel", ["zero=1", "zero=3"])
def test_ranks_that_talk_inside_of_a_forward_are_refused(
    run_distributed: RunDistributed, parallel: str
) -> None:
    for said in run_distributed(refused_under, 2, parallel):
        assert (
            f"With parallel='{parallel}' ranks communicate inside forward" in said and "lockstep tune" in said
        )
