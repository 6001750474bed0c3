"""A model, data and the weights that plain torch ends with, for the loops of the guides on FSDP and DeepSpeed."""

from __future__ import annotations

import torch
from torch import nn

ROWS, BATCH, LR = 24, 4, 0.01


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.down(torch.relu(self.up(rows)))


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(rows)
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    rows = torch.randn(ROWS, 4, generator=source)
    return rows, (rows.sum(1) > 0).long()


def sums(state: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value.detach().double().abs().sum()) for name, value in sorted(state.items())}


def whole(
    epochs: int = 1,
    accumulation: int = 1,
    norm: float | None = None,
    seed: int = 0,
    warmup: int = 0,
    lr: float = LR,
) -> tuple[list[float], dict[str, float]]:
    """Losses of the batches and sums of weights, by plain torch on one process.

    ``warmup``: the rate of DeepSpeed's linear WarmupLR, which is 0 in the first two steps.
    """
    model = Model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(max(step - 1, 0) / warmup, 1.0) if warmup else 1.0
    )
    rows, targets = data()
    losses = []
    for _ in range(epochs):
        for number, start in enumerate(range(0, ROWS, BATCH), 1):
            batch = slice(start, start + BATCH)
            loss = nn.functional.cross_entropy(model(rows[batch]), targets[batch])
            (loss / accumulation).backward()
            losses.append(loss.item())
            if number % accumulation == 0:
                if norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return losses, sums(model.state_dict())
