"""How much Python runs in each step of a plain loop. Calls are counted, which no other process disturbs."""

from __future__ import annotations

import gc
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import Accelerator
from lockstep.observe.measures import StepAssembler
from tests.patching import module_of

SOURCE = str(Path(lockstep.__file__).parent)
STEPS = 50
BEGINNING = 15
"""Steps before those that are counted: in some of them measures look at more."""


def calls_of(step: Callable[[], None]) -> tuple[float, float]:
    """Calls of Python functions (and resumed generators) in a step: those of Lockstep, and of all others."""
    found = Counter[bool]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found[frame.f_code.co_filename.startswith(SOURCE)] += 1

    for _ in range(BEGINNING):
        step()
    sys.setprofile(note)
    for _ in range(STEPS):
        step()
    sys.setprofile(None)
    return found[True] / STEPS, found[False] / STEPS


def test_a_step_makes_few_calls_more_than_one_by_hand(monkeypatch: Any) -> None:
    # What is done a few times a second counts for none of the steps, however slow the machine is.
    monkeypatch.setattr(module_of(StepAssembler), "SHOWN_EVERY_S", math.inf)
    data = TensorDataset(
        torch.randn(4 * (BEGINNING + STEPS + 2), 8), torch.randn(4 * (BEGINNING + STEPS + 2), 1)
    )

    def loop(model: Any, optimizer: Any, loader: Any, backward: Any, clip: Any) -> Callable[[], None]:
        batches = iter(loader)

        def step() -> None:
            inputs, targets = next(batches)
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            backward(loss)
            clip(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def made() -> tuple[Any, Any, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        return model, torch.optim.AdamW(model.parameters(), fused=True), DataLoader(data, batch_size=4)

    by_hand = calls_of(loop(*made(), torch.Tensor.backward, torch.nn.utils.clip_grad_norm_))
    gc.collect()  # measures of an Accelerator that another test has left would be told of these steps, too
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(*made())
    own, others = calls_of(loop(*prepared, accelerator.backward, accelerator.clip_grad_norm_))
    # Hooks on every optimizer, which another test may have left, are called in both loops.
    assert own - by_hand[0] <= 90, (own, by_hand)
    assert others <= by_hand[1] + 20, (others, by_hand)
