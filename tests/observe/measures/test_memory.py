"""Memory by category, against sizes that are known."""

from __future__ import annotations

import mmap
import resource
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep import Accelerator
from lockstep.history import EVENTS, read_lines
from lockstep.runtime import PARTS


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


def test_one_step_is_followed(tmp_path: Path) -> None:
    accelerator = Accelerator(project_dir=tmp_path)
    model: Any = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    kept: list[torch.Tensor] = []
    for step in range(8):
        loss = model(torch.randn(2, 4)).sum()
        if step == 5:
            # 64 MiB, in the step that is followed: new pages, where malloc may have some that were freed before
            kept.append(torch.frombuffer(mmap.mmap(-1, 2**26), dtype=torch.float32).fill_(1))
            time.sleep(0.05)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    (event,) = (line for line in read_lines(tmp_path / "run" / EVENTS) if line["event"] == "memory")
    seconds, there, parts = zip(*event["points"], strict=True)
    assert event["step"] == 6
    assert list(seconds) == sorted(seconds) and seconds[-1] >= 0.05
    assert max(there) - min(there) >= 0.9 * 2**26  # what others before it have left may go meanwhile
    assert "forward" in parts and set(parts) <= set(PARTS)
