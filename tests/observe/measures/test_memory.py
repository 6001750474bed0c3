"""Memory by category, against sizes that are known."""

from __future__ import annotations

import resource
from typing import Any

import torch

from lockstep import Accelerator


def test_state_is_counted_and_the_peak_is_the_process() -> None:
    accelerator = Accelerator()
    model: Any = torch.nn.Linear(100, 100, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    for _ in range(4):
        accelerator.backward(model(torch.randn(2, 100)).sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    memory = accelerator.measures.memory
    weights = 100 * 100 * 4
    assert memory["weights"] == memory["gradients"] == weights
    assert memory["optimizer"] == 2 * weights + 4  # two moments, and a counter
    assert memory["peak"] == sum(value for name, value in memory.items() if name != "peak")
    assert memory["peak"] <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert memory["peak"] >= 50 * 2**20
    told = [step.memory for step in accelerator.measures._recent]
    assert told[0] is None and told[1] == memory and told[2:] == [None, None]
