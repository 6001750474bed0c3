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
from parallel.context.comparing import fast_and_all, verdicts, what_is_wrong
from parallel.tensor.problem import difference
from tests.frozen.verdicts import hold

WIDTH, LENGTH = 16, 16
Fragment = Callable[[nn.Module, Tensor], Tensor]


def noted(m: Any, x: Tensor) -> Tensor:
    m.seen = x.amax(-1)
    return x * m.seen.unsqueeze(-1)


CHUNK = LENGTH // 2
"""Positions of a rank, which numbers of heads, experts and features may equal."""


def of_experts(m: Any, x: Tensor) -> Tensor:
    """Each of ``CHUNK`` experts is a column of weights; ``arange`` numbers them."""
    gates = F.linear(x, m.linear.weight[:CHUNK]).softmax(-1)
    chosen = gates.argmax(-1, keepdim=True) == torch.arange(CHUNK)
    return m.linear(x) * (gates * chosen).sum(-1, keepdim=True)


def over_heads(m: Any, x: Tensor) -> Tensor:
    """Attention of ``CHUNK`` heads of one position to each other."""
    heads = x.unflatten(-1, (CHUNK, -1))
    return ((heads @ heads.mT).softmax(-1) @ heads).flatten(2)


def over_features(m: Any, x: Tensor) -> Tensor:
    """A convolution along the features of each position."""
    return F.conv1d(x.flatten(0, 1)[:, None], m.linear.weight[:1, None, :3], padding=1).view_as(x)


def explicit_causal(m: Any, x: Tensor) -> Tensor:
    q = x.unflatten(-1, (4, 4)).transpose(1, 2)
    mask = torch.ones(LENGTH, LENGTH).tril().log()
    return F.scaled_dot_product_attention(q, q, q, mask).transpose(1, 2).flatten(2)


def narrower_values(m: Any, x: Tensor) -> Tensor:
    q = x.unflatten(-1, (4, 4)).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, q, q[..., :3], is_causal=True)
    return F.pad(out.transpose(1, 2).flatten(2), (0, 4))


def other_sequence(m: Any, x: Tensor) -> Tensor:
    """Cross-attention to a memory that every rank has."""
    q = x.unflatten(-1, (4, 4)).transpose(1, 2)
    k = m.linear.weight[:6].expand(len(x), 6, WIDTH).unflatten(-1, (4, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


RIGHT: dict[str, Fragment] = {
    "experts as many as positions": of_experts,
    "heads as many as positions": over_heads,
    "mean over as many heads": lambda m, x: (
        x.unflatten(-1, (CHUNK, -1)).transpose(1, 2).mean(1).repeat(1, 1, CHUNK)
    ),
    "roll of as many features": lambda m, x: x.unflatten(-1, (CHUNK, -1)).roll(1, 2).flatten(2),
    "convolution over features": over_features,
    "an explicit causal mask": explicit_causal,
    "narrower values": narrower_values,
    "another sequence": other_sequence,
    "gelu": lambda m, x: F.gelu(x),
    "linear": lambda m, x: m.linear(x),
    "gate": lambda m, x: x * m.linear(x).sigmoid(),
    "mean over features": lambda m, x: x - x.mean(-1, keepdim=True),
    "einsum": lambda m, x: torch.einsum("bsd,ed->bse", x, m.linear.weight),
    "kept on the block": noted,
}
MIXING: dict[str, Fragment] = {
    "positions counted": lambda m, x: x * torch.arange(x.shape[1])[:, None],
    "rows of a table": lambda m, x: x + torch.linspace(0, 1, 64 * WIDTH).view(64, WIDTH)[: x.shape[1]],
    "convolution": lambda m, x: F.conv1d(x.mT, m.linear.weight[..., None].repeat(1, 1, 3), padding=1).mT,
    "pooled keys": lambda m, x: F.scaled_dot_product_attention(
        x, x.unflatten(1, (2, -1)).mean(2), x[:, ::4][:, :2]
    ),
    "scores": lambda m, x: (x @ x.mT).softmax(-1) @ x,
    "pad": lambda m, x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "roll": lambda m, x: x.roll(1, 1),
    "first token": lambda m, x: x * x[:, :1],
    "mean transposed": lambda m, x: x.transpose(1, 2).mean(-1).unsqueeze(1),
    "pooling": lambda m, x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "softmax": lambda m, x: x.softmax(1),
    "group norm": lambda m, x: F.group_norm(x.transpose(1, 2), 4).transpose(1, 2),
    "einsum over s": lambda m, x: torch.einsum("bsd->bd", x)[:, None] * x,
    "fft": lambda m, x: torch.fft.fft(x, dim=1).real,
    "cumsum": lambda m, x: x.transpose(1, 2).cumsum(-1).transpose(1, 2),
    "sort": lambda m, x: x.transpose(1, 2).sort(-1)[0].transpose(1, 2),
    "unfold": lambda m, x: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).sum(-1),
    "variance of all": lambda m, x: x / x.transpose(0, 1).flatten(1).std(),
}
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "mean pooling": lambda x: x + x.mean(1, keepdim=True),
    "first token": lambda x: x + x[:, :1],
    "shift": lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1],
}
FAST = (
    "experts as many as positions",
    "heads as many as positions",
    "an explicit causal mask",
    "narrower values",
    "another sequence",
    "positions counted",
    "pooled keys",
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


def alone(fragment: Fragment) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients in one process."""
    model = Model(fragment)
    loss = run(model)
    loss.backward()
    return loss.item(), gradients(model)


def split(method: str, names: list[str], between: bool, verify: str = "first_step") -> list[Any]:
    """Of each fragment the message that refuses it, or the loss and all gradients."""
    torch.set_num_threads(1)
    found: list[Any] = []
    for name in names:
        accelerator = Accelerator(cpu=True, parallel=f"cp=2 cp_method={method} blocks=Block verify={verify}")
        model = Model(None, BETWEEN[name]) if between else Model({**RIGHT, **MIXING}[name])
        model = accelerator.prepare(model)
        try:
            loss = run(model)
            accelerator.backward(loss)
            found.append((loss.item(), gradients(accelerator.unwrap_model(model))))
        except UsageError as error:
            found.append(str(error))
        accelerator.free_memory()
    return found


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("names", fast_and_all(FAST, (*RIGHT, *MIXING)))
def test_a_fragment_is_right_by_itself_or_refused_by_the_first_batch(
    run_distributed, method: str, names: Any
) -> None:
    for table, verify in ((RIGHT, "off"), (MIXING, "first_step")):
        chosen = [name for name in names if name in table]
        expected = {name: alone(table[name]) for name in chosen}
        ranks = [
            verdicts(dict(zip(chosen, found, strict=True)), expected, difference, 1e-5, 1e-4)
            for found in run_distributed(split, 2, method, chosen, False, verify, timeout_s=240)
        ]
        hold(f"context, {method} verify={verify}", ranks)
        refused = dict.fromkeys(MIXING, "'blocks.1")
        wrong = [one for said in ranks for one in what_is_wrong(said, refused)]
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("method", ["ring", pytest.param("ulysses", marks=pytest.mark.exhaustive)])
def test_the_first_batch_stops_what_mixes_positions_between_blocks(run_distributed, method: str) -> None:
    between = list(BETWEEN)
    ranks = run_distributed(split, 2, method, between, True, timeout_s=120)
    found = [dict(zip(between, messages, strict=True)) for messages in ranks]
    hold(
        f"context between blocks, {method}",
        [
            {name: ("refused" if isinstance(one, str) else "differs", one) for name, one in rank.items()}
            for rank in found
        ],
    )
    for messages in ranks:
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
    accelerator = Accelerator(cpu=True, parallel=f"cp=2 {blocks}")
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
        assert "Name with blocks=Feed modules that" in message
    model = InDictionary()
    loss = run(model)
    loss.backward()
    for found, gradient in run_distributed(in_dictionary, 2, "blocks=Feed"):
        assert abs(found - loss.item()) < 1e-5
        assert difference(gradient, gradients(model)) < 1e-4
