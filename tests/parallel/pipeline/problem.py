"""The oracle of the pipeline tests: small models, trained in plain torch on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config import Schedule
from lockstep.torch_internals import splits_backward_exactly

VOCABULARY, LENGTH, ROWS, WIDTH = 31, 12, 8, 16


def schedules(*names: str) -> list[str]:
    """Those of ``names``, of all schedules without any, that are not refused with the installed torch."""
    split = () if splits_backward_exactly() else ("zero_bubble", "zbv", "dualpipev")
    return [name for name in names or Schedule.list() if name not in split]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.second = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    """As examples/gpt: the output is the token embedding, used as a matrix. With targets it returns the loss."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.token(tokens) + self.position(positions)))
        logits = F.linear(x, self.token.weight)
        return logits if targets is None else loss_of(logits, targets)


class Uneven(nn.Module):
    """What real models have: several arguments of blocks, a parameter of the model itself, a frozen block, a bias
    learned outside of blocks and given to each, tuples, and experts chosen by the values of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.distance = nn.Embedding(LENGTH, 1)
        self.layers = nn.ModuleList(BiasedBlock() for _ in range(4))
        self.layers[0].requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        steps = torch.arange(tokens.shape[1])
        bias = self.distance((steps[:, None] - steps).abs())[..., 0]
        waves = (steps * self.scale).cos()[:, None]
        x = self.embed(tokens) + self.start
        count = torch.zeros((), dtype=torch.int64)
        for layer in self.layers:
            x, count = layer(x, bias=bias, extra={"waves": waves, "mask": mask}, count=count)
        logits = self.head(x)
        return {"loss": loss_of(logits, tokens), "logits": logits}


class BiasedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(
        self, x: Tensor, bias: Tensor, extra: dict[str, Tensor], count: Tensor
    ) -> tuple[Tensor, Tensor]:
        weights = (bias + extra["mask"][:, None, :]).softmax(-1)
        x = x + weights @ self.mix(x) * extra["waves"]
        rows = x.flatten(0, 1)
        gates, choices = self.router(rows).softmax(-1).max(-1)
        for index, expert in enumerate(self.experts):
            chosen = choices == index
            rows = rows + chosen[:, None] * gates[:, None] * expert(rows)
        return rows.view_as(x), count + 1


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def tokens(count: int, rows: int = ROWS, seed: int = 1) -> Iterator[Tensor]:
    """``count`` batches of token sequences."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)


def train(
    model: nn.Module,
    parameters: Callable[[], Any],
    losses: Callable[[nn.Module, Tensor], Tensor],
    steps: int = 4,
    rate: float = 1e-2,
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """AdamW: the loss of each step, and the gradients of the first and the last by name.

    ``parameters()`` is asked after the first forward; ``losses(model, batch)``.
    """
    optimizer: torch.optim.Optimizer | None = None
    values, gradients = [], []
    for step, batch in enumerate(tokens(steps)):
        loss = losses(model, batch)
        named = dict(parameters())
        optimizer = optimizer or torch.optim.AdamW(named.values(), lr=rate)
        loss.backward()
        if step in (0, steps - 1):
            gradients.append({name: p.grad.clone() for name, p in named.items() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values, gradients


def difference(
    got: tuple[list[float], list[dict[str, Tensor]]], expected: tuple[list[float], list[dict[str, Tensor]]]
) -> tuple[float, float]:
    """Largest relative difference of a loss, and of a gradient of the first step (norm-wise)."""
    losses = max(abs(a - b) / abs(b) for a, b in zip(got[0], expected[0], strict=True))
    return losses, gradient_difference(got[1][0], expected[1][0])


def gradient_difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(((got[name] - expected[name]).norm() / expected[name].norm()).item() for name in got)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.grad.clone() for name, p in model.named_parameters() if not p.is_meta and p.grad is not None
    }
