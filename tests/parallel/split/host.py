"""A small language model as people write one, into which a fragment goes: the same host under every strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.nn import MixtureOfExperts

WIDTH, HEADS, HIDDEN, VOCABULARY, BLOCKS = 16, 4, 32, 32, 4
Function = Callable[..., Any]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # a bias of keys changes nothing

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module, experts: nn.Module | None) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), attention
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), mlp
        if experts is not None:
            self.norm3, self.experts = nn.LayerNorm(WIDTH), experts

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = x + self.attn(self.norm1(x), *args, **kwargs)
        x = x + self.mlp(self.norm2(x))
        return x if not hasattr(self, "experts") else x + self.experts(self.norm3(x))


@dataclass(frozen=True)
class Fragment:
    """What one model has of its own.

    ``attention``, ``mlp``: modules in the blocks ``at``; ``block``: what goes in place of a block, given that one;
    ``build``: changes the whole model; ``start``: from ids to the first block; ``body``: through all blocks;
    ``loss``: from the last norm to what the model returns; ``forward``: all of it; ``outside``: the loss of what the
    model returns, computed by the loop; ``given``: further arguments, of a generator and the number of rows.
    """

    attention: Callable[[], nn.Module] = Attention
    mlp: Callable[[], nn.Module] = MLP
    block: Callable[[Block], nn.Module] | None = None
    at: tuple[int, ...] = tuple(range(BLOCKS))
    build: Callable[[Any], None] | None = None
    start: Function | None = None
    body: Function | None = None
    loss: Function | None = None
    forward: Function | None = None
    outside: Function | None = None
    given: Callable[[torch.Generator, int], Mapping[str, Any]] = lambda generator, rows: {}
    rows: int = 8
    length: int = 12
    vocabulary: int = VOCABULARY
    padded: bool = False
    together: bool = False
    """Under ``ep`` the oracle is one call with the batches of both ranks, not the mean of two calls."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Strategy -> further words for ``parallel``."""
    model: Callable[[bool], nn.Module] | None = None
    """In place of this host; is it told whether there shall be a mixture of experts."""
    steps: int = 2


class LanguageModel(nn.Module):
    def __init__(self, fragment: Fragment, experts: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(fragment.vocabulary, WIDTH)
        self.blocks = nn.ModuleList(self._block(fragment, i, experts) for i in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, fragment.vocabulary)
        self.fragment = [fragment]
        if fragment.build is not None:
            fragment.build(self)

    @staticmethod
    def _block(fragment: Fragment, index: int, experts: bool) -> nn.Module:
        mixture = MixtureOfExperts(WIDTH, HIDDEN, num_experts=4) if experts else None
        if index not in fragment.at:
            return Block(Attention(), MLP(), mixture)
        block = Block(fragment.attention(), fragment.mlp(), mixture)
        return block if fragment.block is None else fragment.block(block)

    def forward(self, ids: Tensor, labels: Tensor, **given: Any) -> Any:
        fragment = self.fragment[0]
        if fragment.forward is not None:
            return fragment.forward(self, ids, labels, **given)
        x = self.embed(ids) if fragment.start is None else fragment.start(self, ids, **given)
        x = through(self, x) if fragment.body is None else fragment.body(self, x, **given)
        loss = fragment.loss or mean_loss
        return loss(self, self.norm(x), labels, **given)


def through(model: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    for block in model.blocks:
        x = block(x, *args, **kwargs)
    return x


def cross_entropy(model: Any, x: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten(), **options)


def mean_loss(model: Any, x: Tensor, labels: Tensor, **given: Any) -> Tensor:
    return cross_entropy(model, x, labels)


def make_model(fragment: Fragment, experts: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LanguageModel(fragment, experts) if fragment.model is None else fragment.model(experts)


def batch(fragment: Fragment, step: int, rank: int = 0) -> dict[str, Any]:
    """Of one rank: under most strategies all have the first one's."""
    generator = torch.Generator().manual_seed(100 * rank + step + 1)
    shape = (fragment.rows, fragment.length)
    ids, labels = (torch.randint(0, fragment.vocabulary, shape, generator=generator) for _ in range(2))
    if fragment.padded and step:  # the first batch has no padding
        for row in range(fragment.rows):
            labels[row, : (row + rank) % 5] = -100
    return {"ids": ids, "labels": labels, **fragment.given(generator, fragment.rows)}


def loss_of(fragment: Fragment, output: Any, labels: Tensor) -> Tensor:
    if fragment.outside is not None:
        return fragment.outside(output, labels)
    if isinstance(output, Mapping):
        return output["loss"]
    if hasattr(output, "loss"):
        return output.loss
    return output[0] if isinstance(output, tuple) else output
