"""Models and loops for the comparison of a split model with the whole one; run on each rank."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Accelerator
from lockstep.errors import LockstepError

WORDS, WIDTH, LENGTH, ROWS = 32, 16, 8, 8


class LargerOnRankOne(torch.autograd.Function):
    """The same number, with another gradient on rank 1; the whole model runs on rank 0 only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.5 if dist.get_rank() == 1 else gradient


class TenthLarger(torch.autograd.Function):
    """As ``LargerOnRankOne``, so that the mean over two ranks is off by a tenth."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.2 if dist.is_initialized() and dist.get_rank() == 1 else gradient


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feedforward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        self.drop = nn.Dropout(0.2)
        self.calls = 0
        self.rows = 0
        if kind == "batchnorm":
            self.norm1 = nn.BatchNorm1d(LENGTH)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        self.rows = len(x)  # a note of a size, no count
        if self.kind == "counter":
            self.calls += 1
            x = x * (1 + 0.1 * self.calls)
        if self.kind == "late counter":
            self.late = getattr(self, "late", 0) + 1
            x = x * (1 + 0.1 * self.late)
        h = self.norm1(x)
        if self.kind == "positions":
            h = h + F.pad(h, (0, 0, 1, 0))[:, :-1]
        query, value = (layer(h).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.query, self.value))
        attended = F.scaled_dot_product_attention(query, query, value, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2)
        if self.kind == "raises" and len(x) != ROWS:
            raise KeyError("micro-batches are not what this takes")
        h = LargerOnRankOne.apply(x) if self.kind == "gradient" else x
        if self.kind == "noise":
            h = h + 0.1 * torch.randn_like(h) * torch.rand(h.shape[-1])
        return x + self.drop(self.feedforward(self.norm2(h)))


class LanguageModel(nn.Module):
    """Four blocks, of which the second is of ``kind``; returns ``loss``, or logits where that is ``none``."""

    def __init__(self, kind: str = "", loss: str = "mean") -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(kind if number == 1 else "") for number in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.kind, self.loss = kind, loss

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            if self.loss == "pooled":
                x = x + x.mean(1, keepdim=True)
        if self.kind == "tenth":
            x = TenthLarger.apply(x)
        logits: Tensor = self.head(x)
        return logits if self.loss == "none" else loss_of(logits, tokens)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def batch(number: int) -> Tensor:
    return torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))


def said(parallel: str, mixed_precision: str = "no", **of_model: str) -> tuple[str, bool]:
    """What the first training call says or raises, and whether a weight has changed then."""
    model = LanguageModel(**of_model)
    torch.manual_seed(0)
    messages = Messages()
    logging.getLogger("lockstep.verify").addHandler(messages)
    accelerator = Accelerator(cpu=True, parallel=parallel, mixed_precision=mixed_precision)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    before = {name: p.detach().clone() for name, p in accelerator.unwrap_model(prepared).named_parameters()}
    try:
        output = prepared(batch(1))
    except LockstepError as error:
        with pytest.raises(LockstepError):  # whoever catches it and goes on is stopped again
            prepared(batch(1))
        now = dict(accelerator.unwrap_model(prepared).named_parameters())
        return str(error), not all(torch.equal(before[name], p) for name, p in now.items())
    loss = output if output.ndim == 0 else loss_of(output, batch(1))
    accelerator.backward(loss)
    optimizer.step()
    return " ".join(messages.texts), True


def table(cells: dict[str, tuple[str, dict[str, str]]]) -> dict[str, tuple[str, bool]]:
    """``said`` of each cell: (parallel, arguments of the model)."""
    torch.set_num_threads(1)
    return {name: said(parallel, **of_model) for name, (parallel, of_model) in cells.items()}


def trained(parallel: str, accumulation: int, kind: str, loss: str = "mean") -> dict[str, Any]:
    """Weights, buffers, counters and the next random number after four batches, of this rank."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, parallel=parallel, gradient_accumulation_steps=accumulation)
    user = LanguageModel(kind, loss)
    model, optimizer = accelerator.prepare(user, torch.optim.AdamW(user.parameters(), 1e-2))
    losses = []
    for number in range(4):
        with accelerator.accumulate(model):
            output = model(batch(number))
            loss_value = output if output.ndim == 0 else loss_of(output, batch(number))
            accelerator.backward(loss_value)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss_value.item())
    inner = accelerator.unwrap_model(model)
    tensors = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
    held = {
        name: getattr(tensor, "_local_tensor", tensor).detach().clone() for name, tensor in tensors.items()
    }
    return {
        "losses": losses,
        **held,
        "draw": torch.rand(3),
        "rows": [b.rows for b in user.blocks if hasattr(b, "rows")],
    }


def by_train_step(parallel: str, reduction: str) -> str:
    """What ``train_step`` of a pipeline says with a loss of this reduction outside of the model."""
    torch.manual_seed(0)
    messages = Messages()
    logging.getLogger("lockstep.verify").addHandler(messages)
    accelerator = Accelerator(cpu=True, parallel=parallel)
    user = LanguageModel(loss="none")
    model, optimizer = accelerator.prepare(user, torch.optim.SGD(user.parameters(), 0.1))

    def function(logits: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction=reduction)

    try:
        accelerator.train_step(model, function, batch(1), batch(1))
    except LockstepError as error:
        return str(error)
    optimizer.step()
    return " ".join(messages.texts)


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
