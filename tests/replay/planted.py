"""Ways to make NaN and infinity, as functions of a module's input [rows, width], and which module makes them where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCKS = 4
INF = float("inf")


def _attention(x: Tensor) -> Tensor:
    scores = x @ x.T
    masked = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool), -INF)
    return masked.softmax(-1) @ x


def _added_mask(x: Tensor) -> Tensor:
    mask = torch.zeros(len(x), len(x))
    mask[2] = -INF
    return F.softmax(x @ x.T + mask, -1) @ x


class _SpoilsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / torch.zeros_like(gradient)


class _GrowsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1000


FINITE: dict[str, Callable[[Tensor], Tensor]] = {
    "grows": lambda x: x * 1000,
    "gradient grows": _GrowsGradient.apply,
}
FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "log of zero": lambda x: (x * 0).log(),
    "log below zero": lambda x: (-x.abs() - 1).log(),
    "zero by zero": lambda x: x * 0 / (x * 0),
    "one by zero": lambda x: 1 / (x * 0).abs(),
    "exp overflows": lambda x: (x * 0 + 1000).exp(),
    "attention to nothing": _attention,
    "a row attends to nothing": _added_mask,
    "deviation of one": lambda x: x / x[:, :1].std(1, keepdim=True),
    "infinity less infinity": lambda x: (x * 0 + INF) - (x * 0 + INF),
}
BACKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "root of zero": lambda x: (x * 0).sqrt(),
    "length of zero": lambda x: x + (x * 0).square().sum(1, keepdim=True).sqrt(),
    "log behind where": lambda x: torch.where(x > INF, (x * 0).log(), x),
    "own function": _SpoilsGradient.apply,
    "divided behind where": lambda x: torch.where(x > INF, x / (x * 0), x),
}


class Planted(NamedTuple):
    """What goes wrong in one step.

    Attributes:
        kind: A key of ``FORWARD`` or ``BACKWARD``; or batch nan, batch inf, loss log, loss mean, embedding, half.
        block: Of the model, in which it is.
        own_code: The block's own code does it, between two of its modules; else a module of its own.
    """

    kind: str
    block: int = 0
    own_code: bool = False
    accumulation: int = 1
    clips: bool = False

    def __str__(self) -> str:
        words = [self.kind, f"block {self.block}", *(["own code"] if self.own_code else [])]
        return ", ".join([*words, *([f"{self.accumulation} micro-batches"] if self.accumulation > 1 else [])])

    @property
    def where(self) -> str:
        if self.kind in BACKWARD or self.kind == "gradient grows":
            return "backward"
        return self.kind.split()[0] if self.kind.startswith(("batch", "loss", "script")) else "forward"

    @property
    def module(self) -> str:
        if self.where in ("batch", "loss", "script"):
            return ""
        if self.kind == "embedding":
            return "enter"
        if self.kind == "half":
            return f"blocks.{self.block}.linear"
        return f"blocks.{self.block}" + ("" if self.own_code else ".fault")


def _table() -> list[Planted]:
    found = []
    for number, kind in enumerate([*FORWARD, *BACKWARD]):
        found.append(Planted(kind, number % BLOCKS, number % 3 == 0, 1 + number % 2, number % 2 == 0))
    found += [Planted("half", 1), Planted("batch nan", accumulation=2), Planted("batch inf")]
    found += [Planted("loss log"), Planted("loss mean", accumulation=2)]
    return [*found, Planted("embedding", accumulation=3), Planted("script root")]


PLANTED = _table()
FAR = [Planted(kind, block, own) for kind in FINITE for block, own in ((2, False), (3, True))]
OTHERS = {
    "one by zero": Planted("one by zero", 2),
    "none": Planted("none"),
    "own steps of two": Planted("none"),
    "batch nan, saved": Planted("batch nan"),
}
BY_TWO = [Planted("zero by zero", 1), Planted("own function", 1), Planted("batch nan", accumulation=2)]
ALL = {str(planted): planted for planted in [*PLANTED, *FAR, *BY_TWO]} | OTHERS
