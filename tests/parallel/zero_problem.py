"""The oracle of the ZeRO tests: a model with what real ones have, trained in plain torch on one process."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from parallel.plain import Clipped as Result
from parallel.plain import difference as difference
from parallel.plain import train_clipped

VOCABULARY, LENGTH, ROWS = 17, 6, 8
STEPS = {"adamw": 20, "sgd": 8}
CLIP = 0.5


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied embedding and head, a frozen layer, a scalar parameter, and three blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


PAIR_BYTES = 2 * 4 * (2 * 16 + 2 * 16 * 64 + 64 + 16)
"""Of two blocks: with groups of this size two blocks of three are gathered together."""


def make_model(width: int = 16) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(width)


def make_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Global micro-batches."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (count, ROWS, LENGTH), generator=generator)
    return [(rows, (3 * rows + 1) % VOCABULARY) for rows in tokens]


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with learning rates of their own."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    if name == "adamw":
        return torch.optim.AdamW([{"params": matrices, "lr": 1e-3}, {"params": others, "lr": 5e-4}])
    return torch.optim.SGD([{"params": matrices, "lr": 0.02}, {"params": others, "lr": 0.01}])


def loss_of(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())


@functools.cache
def train(optimizer_name: str, accumulation: int, steps: int | None = None) -> Result:
    torch.set_num_threads(1)
    model = make_model()
    optimizer = make_optimizer(optimizer_name, model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    steps = steps or STEPS[optimizer_name]
    losses = (loss_of(model, *batch) for batch in make_batches(steps * accumulation))
    return train_clipped(model, losses, accumulation, CLIP, [optimizer, scheduler])
