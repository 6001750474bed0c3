"""Small problems whose gradients plain torch gives in one batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from parallel.plain import difference as difference

FEATURES, CLASSES = 6, 3
# Samples of micro-batch i on rank r: all different, so that no mean of means is right by chance.
COUNTS = ((3, 7, 2), (5, 1, 9), (8, 4, 6), (2, 11, 5))


def make_model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def make_rows(rank: int, micro_batch: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + micro_batch)
    return (
        torch.randn(count, FEATURES, generator=generator),
        torch.randint(0, CLASSES, (count,), generator=generator),
    )


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def one_big_batch(counts: list[tuple[int, int, int]], row_weights: bool = False) -> dict[str, torch.Tensor]:
    """Gradients of the mean over the rows of all (rank, micro-batch, count), with weights 1, 2, 3, ... if asked."""
    model = make_model()
    parts = [(*make_rows(*place), torch.arange(1.0, place[2] + 1)) for place in counts if place[2]]
    rows, labels, weights = (torch.cat(column) for column in zip(*parts, strict=True))
    losses = F.cross_entropy(model(rows), labels, reduction="none")
    (losses * weights).sum().div(weights.sum()).backward() if row_weights else losses.mean().backward()
    return gradients(model)


def places(world_size: int, micro_batches: int) -> list[tuple[int, int, int]]:
    return [(r, i, COUNTS[r][i]) for r in range(world_size) for i in range(micro_batches)]
