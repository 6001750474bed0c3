"""A loop that the tests of measures share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from lockstep import Accelerator


def train_on(
    accelerator: Accelerator,
    model: Any,
    batches: Iterable[Any],
    before_step: Callable[[int], object] = lambda number: None,
) -> None:
    """Train on the sum of outputs, to the end; ``batches`` may be a loader. ``before_step`` gets numbers from 0."""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    for number, batch in enumerate(batches):
        before_step(number)
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
