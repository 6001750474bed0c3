"""The model, optimizer and schedule of the audit, for both the run under Lockstep and the plain one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from checkpoint.audit.loaders import CLASSES, FEATURES

WIDTH, MAX_NORM = 11, 0.5


class Block(nn.Module):
    """``random``: with dropout and BatchNorm, whose results depend on how rows are dealt to the ranks."""

    def __init__(self, is_random: bool) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if is_random else nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2 if is_random else 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Widths that no number of ranks divides."""

    def __init__(self, is_random: bool) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(Block(is_random) for _ in range(2))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.last(x)
        return out


def make_model(seed: int, is_random: bool) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(is_random)


def make_optimizer(name: str, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """An optimizer with momentum or AdamW, and a schedule that never repeats a rate."""
    optimizer: torch.optim.Optimizer
    if name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def rate(step: int) -> float:
    return (1 + step % 3) / (1 + 0.02 * step)
