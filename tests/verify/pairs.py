"""Right models x ways to split them: each pair must be verified, on any processor."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Accelerator
from lockstep.errors import LockstepError
from tests.parallel import split_problem
from tests.verify.cells import Messages

WORDS, LENGTH, ROWS = 48, 16, 8
Activation = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, act: Activation, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = norm(width), norm(width), Attention(width)
        self.up, self.down, self.act = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), act

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """Returns logits, or with ``loss`` the loss; ``scale`` multiplies all first weights."""

    def __init__(
        self,
        width: int = 32,
        layers: int = 2,
        act: Activation = F.gelu,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        tied: bool = False,
        loss: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, act, norm) for _ in range(layers))
        self.norm, self.head, self.loss = norm(width), nn.Linear(width, WORDS, bias=not tied), loss
        if tied:
            self.head.weight = self.embed.weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(scale)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if not self.loss:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gelu": LanguageModel,
    "relu": partial(LanguageModel, act=F.relu, layers=3),
    "rms norm": partial(LanguageModel, norm=nn.RMSNorm, act=F.silu),
    "tied": partial(LanguageModel, tied=True),
    "loss": partial(LanguageModel, loss=True, layers=3),
    "deep": partial(LanguageModel, layers=8, width=16),
    "small weights": partial(LanguageModel, scale=0.05),
    "large weights": partial(LanguageModel, scale=3.0, act=F.relu),
    "gpt": partial(split_problem.gpt, vocabulary=WORDS, context=LENGTH, width=32, layers=3, heads=4),
}

Pair = tuple[str, str, str, str]
"""Of a model, the words of ``parallel``, ``mixed_precision``, and the type of its own weights ("": fp32)."""


def pairs_of(model: str, ranks: int) -> list[Pair]:
    """All ways in which so many ranks split a model."""
    if ranks == 4:
        return [(model, "zero=3 tp=2", precision, "") for precision in ("bf16", "fp16")]
    plain = ["tp=2", "pp=2", "cp=2"]
    return [
        *((model, parallel, "no", "") for parallel in (*plain, "cp=2 cp_method=ulysses")),
        *((model, "zero=3 cp=2", precision, "") for precision in ("bf16", "fp16")),
        *((model, parallel, "no", own) for own in ("bfloat16", "float16") for parallel in plain),
    ]


class LargerOnRankOne(torch.autograd.Function):
    """The same numbers, with a gradient 1.6 times as large on rank 1, where ranks compute at all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.6 if dist.is_initialized() and dist.get_rank() == 1 else gradient


def _coarse(a: Tensor, b: Tensor) -> Tensor:
    """The product of [..., n, k] and [..., k, m], as a sum of parts of 16 terms that is rounded after each part."""
    parts = (
        (a[..., i : i + 16, None].float() * b[..., None, i : i + 16, :].float()).sum(-2).to(a.dtype)
        for i in range(0, a.shape[-1], 16)
    )
    return functools.reduce(torch.add, parts)


@contextmanager
def coarse_products() -> Iterator[None]:
    """Compute products as a processor might that adds up in the type of the factors: worse than any known one."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", _coarse, "CPU")
    library.impl("bmm", _coarse, "CPU")
    library.impl("addmm", lambda c, a, b, beta=1, alpha=1: c * beta + _coarse(a, b) * alpha, "CPU")
    try:
        yield
    finally:
        library._destroy()


def said(pairs: list[Pair], seed: int, is_wrong: bool = False, is_coarse: bool = False) -> dict[Pair, str]:
    """What the first training call of each says or raises on this rank."""
    torch.set_num_threads(1)
    with coarse_products() if is_coarse else nullcontext():
        return {pair: _said(*pair, seed=seed, is_wrong=is_wrong) for pair in pairs}


def _said(model: str, parallel: str, precision: str, own: str, *, seed: int, is_wrong: bool) -> str:
    torch.manual_seed(seed)
    built = MODELS[model]()
    if own:
        built.to(getattr(torch, own))
    if is_wrong:
        built.get_submodule("head").register_forward_pre_hook(
            lambda _, args: (LargerOnRankOne.apply(args[0]),)
        )
    accelerator = Accelerator(cpu=True, parallel=parallel, mixed_precision=precision)
    tokens = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    messages, logger = Messages(), logging.getLogger("lockstep.verify")
    logger.addHandler(messages)
    try:
        prepared, _ = accelerator.prepare(built, torch.optim.SGD(built.parameters(), 0.1))
        prepared(tokens)
    except LockstepError as error:
        return str(error)
    finally:
        logger.removeHandler(messages)
    return " ".join(messages.texts)
