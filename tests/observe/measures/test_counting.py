"""Samples, tokens and the loss of a step, in loops of different shapes, against numbers that are known beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep import Accelerator

ROWS, LENGTH, BATCH = 24, 3, 2


def prepared(steps: int = 1) -> tuple[Accelerator, Any, Any, Any]:
    """A model whose loss on a batch is the mean of its tokens, which are 0, 1, 2, ... row by row."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model: Any = torch.nn.Linear(LENGTH, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1 / LENGTH)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    rows: Any = [{"input_ids": torch.full((LENGTH,), row)} for row in range(ROWS)]
    loader: Any = DataLoader(rows, batch_size=BATCH)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["input_ids"].float()).mean()


def counts_of(accelerator: Accelerator) -> list[tuple[int | None, float | None, float | None]]:
    """Samples, tokens and loss of each step."""
    accelerator.end_training()
    return [(step.samples, step.tokens, step.loss) for step in accelerator.measures.recent]


def in_groups(loader: Any, size: int) -> Iterator[list[Any]]:
    iterator = iter(loader)
    while group := [batch for _, batch in zip(range(size), iterator, strict=False)]:
        yield group


def test_a_loop_that_takes_all_micro_batches_before_it_trains() -> None:
    """As transformers' Trainer: shares of one loss, and accumulation that the accelerator knows nothing of."""
    accelerator, model, optimizer, loader = prepared()
    for group in in_groups(loader, 3):
        for batch in group:
            accelerator.backward(loss_of(model, batch) / len(group))
        optimizer.step()
        optimizer.zero_grad()
    means = [BATCH * 3 * step + (BATCH * 3 - 1) / 2 for step in range(4)]
    assert counts_of(accelerator) == [(6, 18, pytest.approx(mean)) for mean in means]


def test_a_loop_that_is_a_batch_ahead() -> None:
    accelerator, model, optimizer, loader = prepared()
    iterator = iter(loader)
    following = next(iterator)
    while following is not None:
        batch, following = following, next(iterator, None)
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    found = counts_of(accelerator)
    assert len(found) == ROWS // BATCH
    assert found == [(2, 6, pytest.approx(2 * step + 0.5)) for step in range(len(found))]


def test_evaluation_between_steps_is_not_counted() -> None:
    accelerator, model, optimizer, loader = prepared()
    other = accelerator.prepare(DataLoader([{"input_ids": torch.ones(7)}] * 5, batch_size=1))  # type: ignore[arg-type]
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        for _ in other:
            with torch.no_grad():
                model(batch["input_ids"].float())
    assert [counted[:2] for counted in counts_of(accelerator)] == [(2, 6)] * (ROWS // BATCH)


def test_two_losses_of_a_batch_are_one_batch_and_are_added_up() -> None:
    accelerator, model, optimizer, loader = prepared()
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        accelerator.backward(10 * loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    assert counts_of(accelerator) == [
        (2, 6, pytest.approx(11 * (2 * step + 0.5))) for step in range(ROWS // BATCH)
    ]


@pytest.mark.parametrize("kind", ["tensor", "each row"])
def test_the_loss_of_a_window_is_its_weighted_mean(kind: str) -> None:
    """Weights 1, 2, 3 of three micro-batches."""
    accelerator, model, optimizer, loader = prepared(3)
    for number, batch in enumerate(loader):
        share = 1.0 + number % 3
        with accelerator.accumulate(model):
            if kind == "each row":
                accelerator.backward(
                    model(batch["input_ids"].float())[:, 0], weight=torch.full((BATCH,), share)
                )
            else:
                accelerator.backward(loss_of(model, batch), weight=torch.tensor(share))
            optimizer.step()
            optimizer.zero_grad()
    firsts = [6 * step for step in range(4)]
    expected = [((first + 0.5) + 2 * (first + 2.5) + 3 * (first + 4.5)) / 6 for first in firsts]
    assert counts_of(accelerator) == [(6, 18, pytest.approx(mean)) for mean in expected]
