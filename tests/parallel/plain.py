"""The oracle: the same training in plain torch, on one process, without Lockstep."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

ROWS, FEATURES, CLASSES = 20 * 3 * 8, 12, 5
SEED = 1234


class Net(nn.Module):
    """Embedding, attention-free mixing, normalisation and a head: a little of everything that has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.mix = nn.Linear(FEATURES * 16, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.tanh(self.mix(self.embed(tokens).flatten(1)))))


def make_model() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Net()


def make_rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(99)
    tokens = torch.randint(0, 17, (ROWS, FEATURES), generator=generator)
    return tokens, tokens.sum(1) % CLASSES


class Rows(IterableDataset):
    """The rows as a stream."""

    def __iter__(self):
        return iter(zip(*make_rows(), strict=True))


def make_dataset(kind: str) -> TensorDataset | Rows:
    return TensorDataset(*make_rows()) if kind == "map" else Rows()


def global_batches(kind: str, epoch: int, batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of the one global order; map-style data are shuffled as torch's DistributedSampler does."""
    tokens, labels = make_rows()
    if kind == "map":
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(SEED + epoch))
        tokens, labels = tokens[order], labels[order]
    return list(zip(tokens.split(batch), labels.split(batch), strict=True))


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=3e-3)
    return torch.optim.SGD(model.parameters(), lr=0.1)


@dataclass
class Result:
    """Mean loss of each optimizer step; gradients before the last step; parameters after it."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


@functools.cache
def train(
    kind: str, optimizer_name: str, accumulation: int, steps: int, batch: int, bf16: bool, slices: int
) -> Result:
    """Train on global micro-batches of ``batch`` rows, with one thread as the ranks do.

    Each micro-batch is cut into ``slices``, whose gradients are averaged: with bf16 the rounding of
    an operation depends on how many rows it sees.
    """
    torch.set_num_threads(1)
    model = make_model()
    optimizer = make_optimizer(optimizer_name, model)
    losses: list[float] = []
    window: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for number, (tokens, labels) in enumerate(global_batches(kind, 0, batch), start=1):
        for rows, targets in zip(tokens.chunk(slices), labels.chunk(slices), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model(rows)
            loss = F.cross_entropy(logits.float(), targets)
            (loss / accumulation / slices).backward()
            window.append(loss.item())
        if number % accumulation == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(window) / len(window))
            window = []
            if len(losses) == steps:
                break
    return Result(losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()})


@dataclass
class Clipped:
    """Loss and norm of gradients of each step; gradients of the last, unclipped; parameters after it."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    extra: Any = None


def train_clipped(
    model: nn.Module,
    micro_batch_losses: Iterable[torch.Tensor],
    accumulation: int,
    clip: float,
    steps_of: Sequence[Any],
) -> Clipped:
    """Train in windows of ``accumulation`` losses, which are computed as they are asked for.

    ``steps_of``: optimizer, and a scheduler if there is one.
    """
    torch.set_num_threads(1)
    result, window = Clipped(), []
    for loss in micro_batch_losses:
        (loss / accumulation).backward()
        window.append(loss.item())
        if len(window) < accumulation:
            continue
        result.losses.append(sum(window) / accumulation)
        result.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        result.norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        for stepper in steps_of:
            stepper.step()
        model.zero_grad()
        window = []
    result.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return result


def full(tensor: Any) -> torch.Tensor:
    """The whole tensor, gathered by torch."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of any tensor, norm-wise."""
    assert actual.keys() == expected.keys()
    return max(
        ((actual[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-12)).item()
        for name in expected
    )
