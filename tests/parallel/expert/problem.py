"""The oracle: a mixture of experts in plain torch on one process, where every token visits every expert.

What it did not choose, or was dropped, is multiplied with zero. Parameters have the names of the real layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from parallel.plain import difference as difference

FEATURES, WIDTH, HIDDEN, EXPERTS, CLASSES, LENGTH = 6, 12, 20, 4, 5, 3


class PlainExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight_in = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))
        self.weight_out = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
        self.bias_in = nn.Parameter(torch.empty(EXPERTS, HIDDEN))
        self.bias_out = nn.Parameter(torch.empty(EXPERTS, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(T, width) to (T, E, width)."""
        inner = torch.einsum("tw,ehw->teh", tokens, self.weight_in) + self.bias_in
        return torch.einsum("teh,ewh->tew", F.gelu(inner), self.weight_out) + self.bias_out


class PlainMixture(nn.Module):
    def __init__(self, top_k: int = 2, factor: float | None = None) -> None:
        super().__init__()
        self.top_k, self.factor = top_k, factor
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = PlainExperts()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, -2)
        logits = self.router(tokens)
        probabilities = logits.softmax(-1)
        gates, chosen = probabilities.topk(self.top_k)
        if self.top_k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        kept = self._kept(chosen)
        self.dropped = 1 - kept.float().mean().item()
        self.tokens_per_expert = [int((chosen == expert).sum()) for expert in range(EXPERTS)]
        fractions = torch.tensor(self.tokens_per_expert) / chosen.numel()
        self.balance = EXPERTS * (fractions * probabilities.mean(0)).sum()
        self.z = torch.log(logits.exp().sum(-1)).square().mean()
        weights = torch.zeros_like(probabilities).scatter(1, chosen, gates * kept)
        return (weights.unsqueeze(-1) * self.experts(tokens)).sum(1).view(hidden.shape)

    def _kept(self, chosen: torch.Tensor) -> torch.Tensor:
        """First come, first served: all first choices, token by token, then all second ones."""
        kept = torch.ones_like(chosen, dtype=torch.bool)
        if self.factor is None:
            return kept
        room = [math.ceil(self.factor * chosen.numel() / EXPERTS)] * EXPERTS
        for choice in range(self.top_k):
            for token, expert in enumerate(chosen[:, choice].tolist()):
                kept[token, choice] = room[expert] > 0
                room[expert] -= 1
        return kept


class Net(nn.Module):
    """Two residual mixtures between two linear layers."""

    def __init__(self, mixture: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(mixture() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def values(model: nn.Module) -> nn.Module:
    """Fill a model's parameters; those of equal names and shapes get equal values. The third expert is unloved."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
            if "router" in name:
                parameter[2] *= 0.2
    return model


def batch(step: int, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(rows, LENGTH, FEATURES, generator=generator)
    return inputs, torch.randint(0, CLASSES, (rows, LENGTH), generator=generator)


def task_loss(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), labels.flatten())


@dataclass
class Result:
    """Of each step the loss without its balancing terms, and both of these; the last step's gradients and load."""

    losses: list[float]
    balance: list[float]
    z: list[float]
    gradients: dict[str, torch.Tensor]
    tokens_per_expert: list[int]
    dropped: list[float]


BALANCE, Z = 0.1, 0.01


def train_plainly(top_k: int, factor: float | None, steps: int) -> Result:
    torch.set_num_threads(1)
    model = values(Net(lambda: PlainMixture(top_k, factor)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result = Result([], [], [], {}, [], [])
    for step in range(steps):
        loss = task_loss(model, *batch(step))
        balance = sum(block.balance for block in model.blocks)
        z = sum(block.z for block in model.blocks)
        optimizer.zero_grad()
        (loss + BALANCE * balance + Z * z).backward()
        result.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        result.losses.append(loss.item())
        result.balance.append(balance.item())
        result.z.append(z.item())
        result.tokens_per_expert = model.blocks[0].tokens_per_expert
        result.dropped.append(model.blocks[0].dropped)
    return result
