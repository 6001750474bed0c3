"""Blocks that look alike and compute differently; what begins at zero; what depends on how many rows there are."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parallel.split.host import HIDDEN, WIDTH, Block, Fragment, cross_entropy, through

Change = Callable[[Tensor], Tensor]


class Changed(nn.Module):
    """What a block gives, changed by a function that nothing but the code of ``change`` tells."""

    def __init__(self, block: Block, change: Callable[[Any, Tensor], Tensor], **held: Any) -> None:
        super().__init__()
        self.block, self.lin, self.change = block, nn.Linear(WIDTH, WIDTH), change
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.change(self, self.lin(x)).tanh()


def around(change: Callable[[Any, Tensor], Tensor], hold: Callable[[int], dict[str, Any]]) -> Fragment:
    """``hold``: what the block of this number has of its own."""

    def build(m: Any) -> None:
        m.blocks = nn.ModuleList(Changed(block, change, **hold(i)) for i, block in enumerate(m.blocks))

    return Fragment(build=build)


def by_function(function: Change) -> Fragment:
    """The third block has it, the others another."""
    factors = [2.0, 3.0]  # in a closure
    plain = lambda x: x * factors[0]  # noqa: E731
    special = lambda x: function(x) * factors[1]  # noqa: E731
    return around(lambda m, x: m.function(x), lambda i: {"function": special if i == 2 else plain})


def if_chosen(is_chosen: Callable[[Any], bool], function: Change) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: function(x) if is_chosen(m) else x


def of_positions(x: Tensor) -> Tensor:
    return x.transpose(1, 2).softmax(-1).transpose(1, 2) * 12


def of_rows(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True)


# What is drawn by masks ---------------------------------------------------------------------------


class Experts(nn.Module):
    """Two of four for each token, chosen by masks; it notes a loss of its router."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens)
        weights, chosen = logits.topk(2)
        weights, out = weights.softmax(-1), torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out[token] += weights[token, place, None] * expert(tokens[token])
        self.router_loss = logits.logsumexp(-1).square().mean()
        return out.view_as(x)


def with_router_losses(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(m, x, y) + 0.1 * sum(block.mlp.router_loss for block in m.blocks)


# Nodes --------------------------------------------------------------------------------------------


class Neighbours(nn.Module):
    """Rows are the nodes of one graph."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block, self.message = block, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.block(torch.zeros_like(x).index_add(0, edges[1], self.message(x[edges[0]])))


def edges(generator: torch.Generator, rows: int) -> dict[str, Tensor]:
    return {"edges": torch.randint(0, rows, (2, 20), generator=generator)}


# What begins at zero ------------------------------------------------------------------------------


def zero(_: int) -> dict[str, Any]:
    return {"scale": nn.Parameter(torch.zeros(()))}


def sum_times_zero(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(m, x, y) + m.scale * F.softplus(m.head(x)).sum() / 100


def add_zero(m: Any) -> None:
    m.scale = nn.Parameter(torch.zeros(()))


ALIKE: dict[str, Fragment] = {
    "a function mixes positions": by_function(of_positions),
    "a function mixes rows": by_function(of_rows),
    "a function of single elements": by_function(torch.sin),
    "an object chooses positions": around(
        if_chosen(lambda m: bool(m.options.mixes), of_positions),
        lambda i: {"options": SimpleNamespace(mixes=i == 2)},
    ),
    "an object chooses rows": around(
        if_chosen(lambda m: bool(m.options.mixes), of_rows),
        lambda i: {"options": SimpleNamespace(mixes=i == 2)},
    ),
    "positions in training": around(if_chosen(lambda m: bool(m.training), of_positions), lambda _: {}),
    "rows in training": around(if_chosen(lambda m: bool(m.training), of_rows), lambda _: {}),
    "zero times positions": around(lambda m, x: x + m.scale * of_positions(x), zero),
    "zero times rows": around(lambda m, x: x + m.scale * of_rows(x), zero),
    "zero times a sum": Fragment(build=add_zero, loss=sum_times_zero),
    "as many rows as four": around(lambda m, x: x * (2 if len(x) >= 4 else 1), lambda _: {}),
    "experts by where": Fragment(mlp=Experts),
    "experts by where, their routers' losses": Fragment(mlp=Experts, loss=with_router_losses),
    "nodes of one graph": Fragment(
        block=Neighbours, body=lambda m, x, edges: through(m, x, edges), given=edges
    ),
}
