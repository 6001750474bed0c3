"""The model of tests that count: its parts have the sizes that formulas are about."""

from __future__ import annotations

import torch
from torch import nn


class BlocksAndRoot(nn.Module):
    """So many blocks of two layers, and a layer that is in none of them. All sizes divide by the ranks."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.blocks = nn.Sequential(*(self._block(width) for _ in range(blocks)))

    def _block(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.first(rows))
