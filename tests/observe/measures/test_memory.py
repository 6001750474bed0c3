"""Memory by category, against sizes that are known."""

from __future__ import annotations

import resource
from typing import Any

import psutil
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
    memories = [step.memory for step in accelerator.measures.recent]
    assert memories[0] is None and memories[1] == memory and memories[2:] == [None, None]


def test_activations_are_told_from_what_was_there_before() -> None:
    """64 MB of activations that no memory before has room for, in a process whose peak is now."""
    accelerator = Accelerator()
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    room = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - psutil.Process().memory_info().rss
    rows = (room + 2**26) // (4 * 4) + 2**20
    for _ in range(4):
        accelerator.backward(model(torch.ones(1, 4).expand(rows, 4)).mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    memory = accelerator.measures.memory
    # what Tanh gives is kept for its backward, and what comes into it is there as well meanwhile
    assert memory["activations"] >= rows * 4 * 4
    assert memory["peak"] == sum(value for name, value in memory.items() if name != "peak")
