"""What people write in blocks: right on a split sequence, or refused by the block's name in its first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Accelerator
from lockstep.errors import UsageError
from lockstep.nn import MixtureOfExperts
from lockstep.parallel.context import region
from parallel.tensor.problem import difference

WIDTH, LENGTH = 16, 16
Fragment = Callable[[nn.Module, Tensor], Tensor]


def shuffled(m: Any, x: Tensor) -> Tensor:
    out = x.clone()
    out[:, 1:] = x[:, :-1]
    return out


def noted(m: Any, x: Tensor) -> Tensor:
    m.seen = x.amax(-1)
    return x * m.seen.unsqueeze(-1)


RIGHT: dict[str, Fragment] = {
    "gelu": lambda m, x: F.gelu(x),
    "linear": lambda m, x: m.linear(x),
    "norm": lambda m, x: F.layer_norm(x, (WIDTH,)),
    "gate": lambda m, x: x * m.linear(x).sigmoid(),
    "softmax over features": lambda m, x: x.softmax(-1),
    "mean over features": lambda m, x: x - x.mean(-1, keepdim=True),
    "there and back": lambda m, x: m.linear(x.transpose(1, 2).flip(1).transpose(1, 2)),
    "flattened": lambda m, x: m.linear(x.flatten(0, 1)).view_as(x),
    "einsum": lambda m, x: torch.einsum("bsd,ed->bse", x, m.linear.weight),
    "chunks of features": lambda m, x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "topk of features": lambda m, x: x * (x >= x.topk(3, dim=-1)[0][..., -1:]),
    "kept on the block": noted,
    "heads": lambda m, x: x.unflatten(-1, (4, 4)).mean(-2).repeat(1, 1, 4),
    "kernel of one": lambda m, x: F.conv1d(x.transpose(1, 2), m.linear.weight[..., None]).transpose(1, 2),
}
MIXING: dict[str, Fragment] = {
    "pad": lambda m, x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "cat": lambda m, x: torch.cat([x[:, :1] * 0, x[:, :-1]], 1),
    "zeros and a slice": shuffled,
    "roll": lambda m, x: x.roll(1, 1),
    "roll without dims": lambda m, x: x.transpose(0, 1).roll(1, 0).transpose(0, 1),
    "first token": lambda m, x: x * x[:, :1],
    "first token by select": lambda m, x: x * x.select(1, 0).unsqueeze(1),
    "last token": lambda m, x: x - x[:, -1:],
    "mean": lambda m, x: x.mean(1, keepdim=True),
    "mean transposed": lambda m, x: x.transpose(1, 2).mean(-1).unsqueeze(1),
    "adaptive pooling": lambda m, x: F.adaptive_avg_pool1d(x.transpose(1, 2), 1).transpose(1, 2),
    "pooling": lambda m, x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "softmax": lambda m, x: x.softmax(1),
    "softmax transposed": lambda m, x: x.transpose(1, 2).softmax(-1).transpose(1, 2),
    "normalize": lambda m, x: F.normalize(x, dim=1),
    "norm over positions": lambda m, x: x / x.norm(dim=1, keepdim=True),
    "std": lambda m, x: x / x.transpose(1, 2).std(-1).unsqueeze(1),
    "group norm": lambda m, x: F.group_norm(x.transpose(1, 2), 4).transpose(1, 2),
    "einsum over s": lambda m, x: torch.einsum("bsd->bd", x)[:, None] * x,
    "einsum of positions": lambda m, x: torch.einsum("bsd,bse->bde", x, x).mean(1, keepdim=True) + x,
    "matmul of positions": lambda m, x: x @ (x.transpose(1, 2) @ x) / LENGTH,
    "fft": lambda m, x: torch.fft.fft(x, dim=1).real,
    "cumsum": lambda m, x: x.transpose(1, 2).cumsum(-1).transpose(1, 2),
    "max": lambda m, x: x + x.transpose(1, 2).max(-1)[0].unsqueeze(1),
    "sort": lambda m, x: x.transpose(1, 2).sort(-1)[0].transpose(1, 2),
    "flip": lambda m, x: x.transpose(1, 2).flip(2).transpose(1, 2),
    "diff": lambda m, x: F.pad(x.diff(dim=1), (0, 0, 1, 0)),
    "unfold": lambda m, x: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).sum(-1),
    "gather": lambda m, x: x.gather(1, x.argsort(1)),
    "variance of all": lambda m, x: x / x.transpose(0, 1).flatten(1).std(),
    "linear over positions": lambda m, x: x + F.linear(x.mT, torch.ones(1, x.shape[1])).mT,
}
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "mean pooling": lambda x: x + x.mean(1, keepdim=True),
    "first token": lambda x: x + x[:, :1],
    "shift": lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1],
}
FAST = (
    "gate",
    "kept on the block",
    "pad",
    "first token",
    "mean transposed",
    "softmax",
    "einsum over s",
)


class Block(nn.Module):
    def __init__(self, fragment: Fragment | None) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.linear, self.fragment = nn.Linear(WIDTH, WIDTH), fragment

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.linear(h if self.fragment is None else self.fragment(self, h))


class Model(nn.Module):
    def __init__(
        self, fragment: Fragment | None = None, between: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(fragment if number == 1 else None) for number in range(3))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            if self.between is not None:
                x = self.between(x)
        return x.square().mean()


def run(model: nn.Module) -> Any:
    return model(torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def split(method: str, names: list[str], between: bool, verify: str, rehearses: bool = True) -> list[Any]:
    """Of each fragment the message that refuses it, or the loss and all gradients."""
    torch.set_num_threads(1)
    found: list[Any] = []
    for name in names:
        accelerator = Accelerator(cpu=True, parallel=f"cp=2 cp_method={method} blocks=Block verify={verify}")
        model = Model(None, BETWEEN[name]) if between else Model({**RIGHT, **MIXING}[name])
        model = accelerator.prepare(model)
        for one in region.regions_of(model):
            one.is_rehearsed = rehearses
        try:
            loss = run(model)
            accelerator.backward(loss)
            found.append((loss.item(), gradients(accelerator.unwrap_model(model))))
        except UsageError as error:
            found.append(str(error))
        accelerator.free_memory()
    return found


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FAST, id="fast"),
        pytest.param(
            tuple(name for name in (*RIGHT, *MIXING) if name not in FAST),
            id="all",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_fragment_is_right_or_refused_without_a_proof(run_distributed, method: str, names: Any) -> None:
    wrong = []
    for results in run_distributed(split, 2, method, list(names), False, "off", timeout_s=240):
        for name, result in zip(names, results, strict=True):
            if name in MIXING:
                if not isinstance(result, str) or "lock 'blocks.1'" not in result:
                    wrong.append(f"{name} is not refused: {result if isinstance(result, str) else result[0]}")
                continue
            if isinstance(result, str):
                wrong.append(f"{name} is refused: {result}")
                continue
            model = Model(RIGHT[name])
            loss = run(model)
            loss.backward()
            apart = difference(result[1], gradients(model))
            if abs(result[0] - loss.item()) > 1e-5 or apart > 1e-4:
                wrong.append(f"{name}: loss {result[0]} instead of {loss.item()}, gradients off by {apart}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("method", ["ring", pytest.param("ulysses", marks=pytest.mark.exhaustive)])
def test_the_first_batch_stops_what_blocks_are_not_rehearsed_for(run_distributed, method: str) -> None:
    inside = ["pad", "first token", "mean transposed", "softmax"]
    for messages in run_distributed(split, 2, method, inside, False, "first_step", False, timeout_s=120):
        for message in messages:
            assert "does not compute what the whole model does" in message
            assert "It begins in module 'blocks.1" in message
    between = list(BETWEEN)
    for messages in run_distributed(split, 2, method, between, True, "first_step", timeout_s=120):
        assert all("does not compute what the whole model does" in message for message in messages)


class Feed(nn.Module):
    """Layers in a dictionary, which are taken for blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Block(None)
        self.layers = nn.ModuleDict(
            {"shared": nn.Linear(WIDTH, WIDTH), "experts": MixtureOfExperts(WIDTH, 8, 4)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.layers["shared"](x) + self.layers["experts"](x)


class InDictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.feed = Feed()

    def forward(self, x: Tensor) -> Tensor:
        return self.feed(x).square().mean()


def in_dictionary(blocks: str) -> Any:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, parallel=f"cp=2 verify=off {blocks}")
    model = accelerator.prepare(InDictionary())
    try:
        loss = run(model)
        accelerator.backward(loss)
    except UsageError as error:
        return str(error)
    return loss.item(), gradients(accelerator.unwrap_model(model))


def test_experts_in_a_dictionary_are_no_blocks_and_the_message_says_which_are(run_distributed) -> None:
    for message in run_distributed(in_dictionary, 2, ""):
        assert "between its blocks 'feed.layers.shared' and 'feed.layers.experts'" in message
        assert message.endswith("with blocks=Feed.")
    model = InDictionary()
    loss = run(model)
    loss.backward()
    for found, gradient in run_distributed(in_dictionary, 2, "blocks=Feed"):
        assert abs(found - loss.item()) < 1e-5
        assert difference(gradient, gradients(model)) < 1e-4
