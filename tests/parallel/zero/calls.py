"""Methods and inner modules of sharded models, called as scripts do, against the same calls of the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Accelerator
from lockstep.errors import UsageError
from lockstep.utils import GatheredParameters


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Half(nn.Module):
    """Blocks, and a norm outside of them."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(ids)
        x = x if beside is None else x + beside
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Translator(nn.Module):
    """Two halves that share an embedding, and weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(16, 8)
        self.encoder, self.decoder = Half(self.shared), Half(self.shared)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor, encoded: torch.Tensor | None = None) -> torch.Tensor:
        encoded = self.encode(ids) if encoded is None else encoded
        return self.head(self.decoder(ids, encoded) * self.scale)

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        return self.encoder(ids) * self.scale

    def score(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.linear(self.scale * 2, self.head.weight)[batch["ids"]]

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, steps: int = 3) -> torch.Tensor:
        encoded = self.encoder(ids)
        for _ in range(steps):
            step = self(ids, encoded)
            ids = (ids + step.argmax(-1) + int((self.scale[0] > 0).item())) % 16
        return ids

    def draw(self, count: int) -> torch.Tensor:
        return torch.ones(count, 8) @ self.scale

    def size(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def fails(self, ids: torch.Tensor) -> None:
        self.encoder(ids)
        raise ArithmeticError("on purpose")


CALLS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "encode": lambda model, ids: model.encode(ids),
    "score": lambda model, ids: model.score({"ids": ids}),
    "encoder": lambda model, ids: model.encoder(ids),
    "encoder, twice": lambda model, ids: model.encoder(ids) + model.encoder(ids),
    "embedding": lambda model, ids: model.shared(ids),
    "head": lambda model, ids: model.head(model.decoder(ids)),
    "generate": lambda model, ids: model.generate(ids),
    "forward": lambda model, ids: model(ids),
}


def problems(stage: int) -> list[str]:
    """What is not as in the whole model: outputs, with gradients and without, and weights after steps."""
    torch.manual_seed(0)
    whole = Translator()
    accelerator = Accelerator(cpu=True, parallel=f"zero={stage} blocks=Block")
    plain = copy.deepcopy(whole)
    model, optimizer = accelerator.prepare(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    found: list[str] = []
    shares = [
        torch.arange(5 * rank, 5 * rank + 6).view(1, 6) % 16 for rank in range(accelerator.num_processes)
    ]
    own = shares[accelerator.process_index]
    with torch.no_grad():
        model(own)  # a backward before the model was called is refused
    for name, call in CALLS.items():
        with torch.no_grad():
            if not torch.allclose(call(model, own), call(plain, own), atol=1e-6):
                found.append(f"{name} without gradients")
        if not torch.allclose(call(model, own), call(plain, own), atol=1e-6):
            found.append(f"{name} with gradients")
        if name == "generate":
            continue
        for beside in (False, True):  # alone, and beside a forward
            loss = call(model, own).square().mean() + (model(own).square().mean() if beside else 0.0)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses = [call(plain, ids).square().mean() for ids in shares]
            if beside:
                losses += [plain(ids).square().mean() for ids in shares]
            (sum(losses) / len(shares)).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            state = accelerator.get_state_dict(model)
            worst = max(float((state[key] - value).abs().max()) for key, value in plain.state_dict().items())
            if worst > 1e-5:
                found.append(f"{name} trained{' beside a forward' if beside else ''}: {worst:.1e}")
    return found


def others() -> list[Any]:
    """Under zero=3: the size, which a rank may ask for alone; words of a refusal; an exception; whether it goes on."""
    torch.manual_seed(0)
    whole = Translator()
    plain = copy.deepcopy(whole)
    accelerator = Accelerator(cpu=True, parallel="zero=3 blocks=Block")
    model = accelerator.prepare(whole)
    ids = torch.arange(6).view(1, 6)
    size = model.size() if accelerator.is_main_process else plain.size()
    model.load_state_dict(plain.state_dict())
    try:
        with torch.no_grad():
            model.draw(3)
        refused = "nothing"
    except UsageError as error:
        refused = str(error)
    try:
        model.fails(ids)
        raised = "nothing"
    except ArithmeticError as error:
        raised = str(error)
    with torch.no_grad():
        right = torch.allclose(model(ids), plain(ids), atol=1e-6)
    return [size == plain.size(), refused, raised, right]


def inside_of_a_block() -> list[str]:
    """What is said where modules inside of a block, or their weights, are used by themselves."""
    torch.manual_seed(0)
    whole = Translator()
    plain = copy.deepcopy(whole)
    model = Accelerator(cpu=True, parallel="zero=3 blocks=Block").prepare(whole)
    block, rows = model.encoder.layers[0], torch.ones(2, 8)
    uses: dict[str, Callable[[], object]] = {
        "a linear": lambda: block.linear(rows),
        "a norm": lambda: block.norm(rows),
        "a weight": lambda: rows @ block.linear.weight,
    }
    said = []
    for name, use in uses.items():
        try:
            use()
            said.append(f"{name} was used")
        except UsageError as error:
            said.append(str(error))
    with GatheredParameters(block.linear.parameters()):
        found = block.linear(rows)
    of_block = [one.encoder.layers[0](rows).detach() for one in (model, plain)]
    assert torch.equal(found.detach(), plain.encoder.layers[0].linear(rows).detach())
    assert torch.allclose(*of_block)
    return said
