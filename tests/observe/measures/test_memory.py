"""The peak of memory, against what the system says."""

from __future__ import annotations

import resource
from typing import Any

import torch

from lockstep import Accelerator


def test_the_peak_is_that_of_the_process() -> None:
    accelerator = Accelerator()
    model: Any = torch.nn.Linear(100, 100, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    for _ in range(4):
        accelerator.backward(model(torch.randn(2, 100)).sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 0.9 * most <= accelerator.measures.memory["peak"] <= most
    memories = [step.memory for step in accelerator.measures.recent]
    assert memories == [accelerator.measures.memory, None, None, None]
