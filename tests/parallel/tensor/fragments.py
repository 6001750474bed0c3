"""What people write between the layers of an MLP or of attention: modules from [batch, length, WIDTH] to the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, HIDDEN = 16, 4, 32


class MLP(nn.Module):
    """``down(between(x, up(x)))``."""

    def __init__(
        self, between: Callable[[nn.Module, Tensor, Tensor], Tensor], hidden: int = HIDDEN, **inner: object
    ) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        for name, value in inner.items():
            setattr(self, name, value)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self, x, self.up(x)))


class Whole(nn.Module):
    """Any function of layers that are attributes."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor], **inner: object) -> None:
        super().__init__()
        for name, value in inner.items():
            setattr(self, name, value)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def same(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return y


class Attention(nn.Module):
    """``query`` and ``key`` change [batch, heads, length, head], ``scores`` the scores, ``after`` the output."""

    def __init__(
        self,
        query: Callable[..., Tensor] = same,
        key: Callable[..., Tensor] = same,
        after: Callable[..., Tensor] = same,
        scores: Callable[..., Tensor] | None = None,
        **inner: object,
    ) -> None:
        super().__init__()
        # A bias of keys changes nothing: its gradient would be made of rounding.
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, False, True, True)
        )
        self.num_heads = HEADS
        for name, value in inner.items():
            setattr(self, name, value)
        self.query, self.key, self.after, self.scores = query, key, after, scores

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (
            layer(x).view(batch, length, self.num_heads, WIDTH // HEADS).transpose(1, 2) for layer in layers
        )
        q, k = self.query(self, x, q), self.key(self, x, k)
        if self.scores is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = self.scores(self, x, q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        y = y.transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(self.after(self, x, y))


class FourLayers(nn.Module):
    """Attention of 'The Annotated Transformer': its layers in one list, queries, keys, values and mask as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.d_k = HEADS, WIDTH // HEADS
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=number != 1) for number in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            layer(x).view(x.size(0), -1, self.h, self.d_k).transpose(1, 2)
            for layer, x in zip(self.linears[:3], (query, key, value), strict=True)
        )
        scores = q @ k.mT / self.d_k**0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        y = (scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(query.size(0), -1, self.h * self.d_k)
        return self.linears[-1](y)


class BiasArgument(nn.Module):
    """A bias of each head, made once, goes to each of the layers as an argument."""

    class Layer(Attention):
        def forward(self, x: Tensor, position_bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
            self.scores = lambda s, x, scores: scores if position_bias is None else scores + position_bias
            return super().forward(x)

    def __init__(self, dims: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(15, HEADS)
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = self.table((places[:, None] - places + 7).clamp(0, 14)).permute(2, 0, 1)
        for number, layer in enumerate(self.layers):
            bias_of = bias if self.dims == 3 else bias[None]
            x = x + (layer(x, bias_of) if number else layer(x, position_bias=bias_of))
        return x


def linear(out: int, width: int = WIDTH) -> nn.Linear:
    return nn.Linear(width, out)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.rand(shape) + 0.5)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = linear(1)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return h * self.gate(x).sigmoid()


def residual_of_gate(m: nn.Module, x: Tensor) -> Tensor:
    gate = torch.sigmoid(m.gate(x))
    return m.down(F.relu(m.up(x)) * gate) + gate * x


def two_rows(m: nn.Module, x: Tensor) -> Tensor:
    hidden = F.gelu(m.up(x))
    return m.down(hidden) * torch.sigmoid(m.other(hidden))


def row_after_row(m: nn.Module, x: Tensor) -> Tensor:
    hidden = F.gelu(m.up(x))
    return m.down(hidden * torch.sigmoid(m.score(hidden)))


def mixed_uses(m: nn.Module, x: Tensor) -> Tensor:
    return m.down(F.relu(m.up(x * m.scale)) * m.scale) * m.scale


def in_place(m: nn.Module, x: Tensor, h: Tensor) -> Tensor:
    h = F.relu(h * 1, inplace=True) + 1
    h += m.gate(x)
    h.add_(x.mean(-1, keepdim=True))
    return h


def filled(m: nn.Module, x: Tensor, h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, 1:] = h[:, :-1] * torch.sigmoid(m.gate(x))[:, :-1]
    return out


def by_keyword(m: nn.Module, x: Tensor, q: Tensor) -> Tensor:
    return m.norm(input=q)


def layers(**more: object) -> dict[str, object]:
    return {"up": linear(HIDDEN), "down": nn.Linear(HIDDEN, WIDTH), **more}


@dataclass(frozen=True)
class Fragment:
    """``make`` a module. ``split``: how many linear layers of it are split; 0: it is left whole.

    ``refused``: a piece of what the first batch says of it.
    """

    make: Callable[[], nn.Module]
    split: int = 2
    refused: str = ""


def of_two_heads(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m.up(x).relu()
    return m.mix(torch.cat([m.actor(hidden).log_softmax(-1), m.critic(hidden)], -1))


def hidden_and_more(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m.up(x).relu()
    return hidden + m.down(hidden).tanh()


def sigmoid_gate(m: nn.Module, x: Tensor, h: Tensor) -> Tensor:
    return F.relu(h) * torch.sigmoid(m.gate(x))


def scaled(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return y * m.scale


OTHER = "does not compute what the whole model does"

FRAGMENTS: dict[str, Fragment] = {
    # MLPs that were right before
    "gelu": Fragment(lambda: MLP(lambda m, x, h: F.gelu(h))),
    "squared relu": Fragment(lambda: MLP(lambda m, x, h: F.relu(h).square())),
    "gated": Fragment(
        lambda: Whole(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), **layers(gate=linear(HIDDEN))), 3
    ),
    "packed": Fragment(
        lambda: Whole(
            lambda m, x: m.down(F.glu(m.up(x))), up=linear(2 * HIDDEN), down=nn.Linear(HIDDEN, WIDTH)
        )
    ),
    "residual inside": Fragment(lambda: Whole(lambda m, x: x + m.down(F.relu(m.up(x))), **layers())),
    # a whole tensor that meets hidden features
    "gate of one": Fragment(lambda: MLP(sigmoid_gate, gate=linear(1))),
    "gate used twice": Fragment(lambda: Whole(residual_of_gate, **layers(gate=linear(1)))),
    "own input's mean": Fragment(lambda: MLP(lambda m, x, h: F.relu(h) + x.mean(-1, keepdim=True))),
    "scale": Fragment(lambda: MLP(scaled, scale=parameter())),
    "scale everywhere": Fragment(lambda: Whole(mixed_uses, **layers(scale=parameter()))),
    "in place": Fragment(lambda: MLP(in_place, gate=linear(1))),
    "torch.where": Fragment(
        lambda: MLP(lambda m, x, h: torch.where(h > 0, h, m.slope * h), slope=parameter())
    ),
    "mean over positions": Fragment(lambda: MLP(lambda m, x, h: h * x.mean((1, 2), keepdim=True))),
    "filled": Fragment(lambda: MLP(filled, gate=linear(1))),
    "softmax in training": Fragment(
        lambda: MLP(lambda m, x, h: h.softmax(-1) if m.training else h), refused=OTHER
    ),
    "module with another order of arguments": Fragment(
        lambda: MLP(lambda m, x, h: m.inner(x=x, h=h), inner=Gate())
    ),
    "operation without a rule": Fragment(
        lambda: MLP(lambda m, x, h: torch.vmap(torch.mul)(h, m.gate(x)), gate=linear(1)), refused=OTHER
    ),
    # hidden features that go to several layers
    "two rows": Fragment(lambda: Whole(two_rows, **layers(other=nn.Linear(HIDDEN, WIDTH))), 3),
    "a row's result on hidden features": Fragment(
        lambda: Whole(row_after_row, **layers(score=nn.Linear(HIDDEN, 1))), 3
    ),
    # what must stay whole
    "two heads": Fragment(
        lambda: Whole(
            of_two_heads,
            up=linear(HIDDEN),
            actor=nn.Linear(HIDDEN, 5),
            critic=nn.Linear(HIDDEN, 1),
            mix=nn.Linear(6, WIDTH),
        ),
        3,
    ),
    "hidden features that are used after the row": Fragment(
        lambda: Whole(hidden_and_more, up=linear(WIDTH), down=linear(WIDTH)), 0
    ),
    "norm of hidden": Fragment(lambda: MLP(lambda m, x, h: m.norm(h), norm=nn.LayerNorm(HIDDEN)), 0),
    "softmax of hidden": Fragment(lambda: MLP(lambda m, x, h: h.softmax(-1)), refused=OTHER),
    "scale of each feature": Fragment(lambda: MLP(scaled, scale=parameter(HIDDEN)), 0),
    "input as wide": Fragment(lambda: MLP(lambda m, x, h: F.relu(h) + x, hidden=WIDTH), 0),
    "hidden features returned": Fragment(
        lambda: Whole(lambda m, x: m.down(h := F.relu(m.up(x))) + h.mean(-1, keepdim=True), **layers()),
        refused="computed from a part",
    ),
    "topk of hidden": Fragment(
        lambda: MLP(lambda m, x, h: h * (h >= h.topk(4, dim=-1)[0][..., -1:])), refused=OTHER
    ),
    # attention
    "attention": Fragment(Attention, 4),
    "attention, its layers in a list": Fragment(
        lambda: Whole(
            lambda m, x: m.attention(x, x, x, torch.ones(x.shape[1], x.shape[1]).tril()),
            attention=FourLayers(),
        ),
        4,
    ),
    "temperature": Fragment(lambda: Attention(query=scaled, scale=parameter()), 4),
    "norms of heads by keyword": Fragment(
        lambda: Attention(query=by_keyword, key=by_keyword, norm=nn.LayerNorm(WIDTH // HEADS)), 4
    ),
    "norm by function": Fragment(
        lambda: Attention(
            query=lambda m, x, q: F.layer_norm(q, (4,), m.weight, m.bias),
            weight=parameter(4),
            bias=parameter(4),
        ),
        0,
    ),
    "norm and gate": Fragment(
        lambda: Attention(
            query=by_keyword,
            after=lambda m, x, y: y * m.gate(x).sigmoid(),
            norm=nn.LayerNorm(4),
            gate=linear(1),
        ),
        4,
    ),
    "gated output": Fragment(
        lambda: Attention(after=lambda m, x, y: y * torch.sigmoid(m.gate(x)), gate=linear(1)), 4
    ),
    "bias of positions": Fragment(
        lambda: Attention(
            scores=lambda m, x, s: s + m.bias[: s.shape[-1], : s.shape[-1]], bias=parameter(8, 8)
        ),
        4,
    ),
    "bias as an argument": Fragment(BiasArgument, 8),
    "bias as an argument of three dimensions": Fragment(lambda: BiasArgument(3), 8, "but with parallel="),
    "scale of each head": Fragment(lambda: Attention(query=scaled, scale=parameter(HEADS, 1, 1)), 0),
    "gate of each head": Fragment(
        lambda: Attention(
            query=lambda m, x, q: q * m.gate(x).transpose(1, 2)[..., None].sigmoid(), gate=linear(HEADS)
        ),
        0,
    ),
    "norm of all heads": Fragment(
        lambda: Attention(after=lambda m, x, y: m.norm(y), norm=nn.LayerNorm(WIDTH)), 4, "but with parallel="
    ),
}

FAST = (
    *("two heads", "attention, its layers in a list", "hidden features that are used after the row"),
    *("gate of one", "own input's mean", "scale everywhere", "gate used twice", "two rows", "filled"),
    *(
        "temperature",
        "gated output",
        "norms of heads by keyword",
        "bias as an argument",
        "scale of each head",
    ),
)


class Model(nn.Module):
    """Two of a fragment, each on a residual, and a pair that can always be split."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = linear(WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inner = nn.ModuleList(make() for _ in range(2))
        self.last = nn.Sequential(linear(HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm, inner in zip(self.norms, self.inner, strict=True):
            x = x + inner(norm(x))
        return x + self.last(x)


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Model(FRAGMENTS[name].make)
