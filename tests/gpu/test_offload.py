"""Training on a CUDA device with state in host memory or in files. Collected everywhere, run where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Accelerator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is visible here"),
]

WIDTH, BLOCKS, STEPS = 512, 8, 4


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS)]
    )


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, WIDTH, generator=generator) for _ in range(STEPS)]


def plain_losses() -> list[float]:
    model = make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    losses = []
    for x in batches():
        loss = model(x.cuda()).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("offload", ["optimizer", "params", "all"])
@pytest.mark.parametrize("place", ["cpu", "folder"])
def test_losses_are_those_of_training_on_the_device(offload: str, place: str, tmp_path: Path) -> None:
    where = f" offload_to={tmp_path}" if place == "folder" else ""
    accelerator = Accelerator(parallel=f"offload={offload}{where}")
    model: Any = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.cuda.reset_peak_memory_stats()
    losses = []
    for x in batches():
        loss = model(x.cuda()).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == pytest.approx(plain_losses(), rel=1e-4)
    weights = sum(parameter.nbytes for parameter in make_model().parameters())
    if offload != "optimizer":
        assert torch.cuda.max_memory_allocated() < 0.9 * 2 * weights  # not all weights and gradients at once
    accelerator.free_memory()
