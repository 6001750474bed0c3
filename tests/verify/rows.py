"""Seven ways in which a split goes wrong that derivation mends, with the derivation switched off; run on each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Accelerator
from lockstep.errors import LockstepError
from lockstep.parallel.tensor import ColumnRowRegion
from tests.patching import module_of

WORDS, WIDTH, ROWS = 32, 16, 8  # the sequence is as long as the batch


class Feedforward(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 1) if kind == "gate" else None
        self.scale = nn.Parameter(torch.linspace(0.5, 1, 4 * WIDTH)) if kind == "features" else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.up(x))
        if self.gate is not None:
            hidden = hidden * self.gate(x).sigmoid()
        if self.scale is not None:
            hidden = hidden * self.scale
        return self.down(hidden)


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feedforward = Feedforward(kind)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "counter":
            self.calls += 1
            x = x * (1 + 0.1 * self.calls)
        h = self.norm1(x)
        if self.kind == "shift":
            h = h + F.pad(h, (0, 0, 1, 0))[:, :-1]
        query, value = (layer(h).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.query, self.value))
        x = x + F.scaled_dot_product_attention(query, query, value).transpose(1, 2).flatten(2)
        x = x + self.feedforward(self.norm2(x))
        if self.kind == "note":
            self.penalty = x.square().sum()
        return x


class LanguageModel(nn.Module):
    """Four blocks, of which the second is of ``kind``."""

    def __init__(self, kind: str = "", reduction: str = "mean") -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(kind if number == 1 else "") for number in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.reduction = reduction

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if positions is not None:
            x = x + positions[None, :, None]
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction=self.reduction)
        return loss + sum(1e-3 * block.penalty for block in self.blocks if block.kind == "note")


@dataclass
class Row:
    """``module``: where it goes wrong; ``parameters``: that are wrong, where their gradients alone are."""

    parallel: str
    make: Callable[[], nn.Module]
    module: str
    more: dict[str, Any] = field(default_factory=dict)


LINE = torch.linspace(0, 1, ROWS)
TABLE = {
    1: Row("tp=2", lambda: LanguageModel("gate"), "module 'blocks.1.feedforward'"),
    2: Row("tp=2", lambda: LanguageModel("features"), "module 'blocks.1.feedforward'"),
    3: Row("cp=2", lambda: LanguageModel("shift"), "module 'blocks.1'"),
    4: Row("pp=2", lambda: LanguageModel(reduction="sum"), "LanguageModel's own forward"),
    5: Row("pp=2", LanguageModel, "LanguageModel's own forward", {"positions": LINE}),
    6: Row("pp=2", lambda: LanguageModel("counter"), "module 'blocks.1'"),
    7: Row("pp=2", lambda: LanguageModel("note"), "LanguageModel's own forward"),
}


def said(row: Row, derives: bool) -> tuple[str, bool]:
    """What the first step says, and whether weights have changed then."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    numbers = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(WORDS, (ROWS, ROWS), generator=numbers) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        if not derives:
            patch.setattr(module_of(ColumnRowRegion), "MARKED_FORWARDS", 0)
        accelerator = Accelerator(cpu=True, parallel=row.parallel)
        user = row.make()
        model, optimizer = accelerator.prepare(user, torch.optim.SGD(user.parameters(), 0.1))
        before = {name: p.detach().clone() for name, p in accelerator.unwrap_model(model).named_parameters()}
        text = ""
        try:
            accelerator.backward(model(ids, labels, **row.more))
            optimizer.step()
        except LockstepError as error:
            text = str(error)
        now = dict(accelerator.unwrap_model(model).named_parameters())
        changed = not all(torch.equal(value, now[name]) for name, value in before.items() if name in now)
        accelerator.free_memory()
    return text, changed


def table(derives: bool, numbers: list[int]) -> dict[int, tuple[str, bool]]:
    return {number: said(TABLE[number], derives) for number in numbers}
