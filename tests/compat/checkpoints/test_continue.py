"""A run that Accelerate saved goes on here with the losses that it has there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator as TheirAccelerator
from torch import nn

from lockstep import Accelerator
from lockstep.compat.checkpoints import read_foreign, write_imported

FEATURES, CLASSES = 6, 3


def prepared(accelerator: Any, seed: int) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, CLASSES))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.03}, {"params": model[3].parameters()}], lr=0.02
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    return model, optimizer, scheduler


def train(accelerator: Any, objects: tuple[nn.Module, Any, Any], steps: range) -> list[float]:
    model, optimizer, scheduler = objects
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(8, FEATURES, generator=generator)
        labels = torch.randint(0, CLASSES, (8,), generator=generator)
        loss = F.cross_entropy(model(rows), labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("safe", [True, False])
def test_a_run_of_accelerate_goes_on_bit_for_bit(
    tmp_path: Path, safe: bool, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = TheirAccelerator(cpu=True)
    objects = prepared(theirs, seed=1)
    train(theirs, objects, range(5))
    theirs.save_state(str(tmp_path / "theirs"), safe_serialization=safe)
    expected = train(theirs, objects, range(5, 9))

    write_imported(read_foreign(tmp_path / "theirs"), str(tmp_path / "ours"))
    ours = Accelerator(cpu=True)
    other = prepared(ours, seed=2)
    with caplog.at_level(logging.WARNING, "lockstep.checkpoint"):
        ours.load_state(tmp_path / "ours")
    assert train(ours, other, range(5, 9)) == expected
    ours.save_state(tmp_path / "again")
