"""What people write in place of attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tests.parallel.split.host import HEADS, WIDTH, Block, Fragment, mean_loss, through
from tests.parallel.split.layers import random

HEAD = WIDTH // HEADS
LENGTH = 12


class Grouped(nn.Module):
    """Fewer heads of keys and values."""

    def __init__(self, kv_heads: int, by_argument: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, kv_heads, HEAD
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, kv_heads * HEAD, bias=False)
        self.v_proj = nn.Linear(WIDTH, kv_heads * HEAD, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.by_argument = by_argument

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        if self.by_argument:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            groups = self.num_heads // self.num_kv_heads
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).contiguous().view(b, s, -1))


class Fused(nn.Module):
    """nanoGPT's, or timm's."""

    def __init__(self, style: str = "nanogpt", by_hand: bool = False) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd, self.style, self.by_hand = HEADS, WIDTH, style, by_hand
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        if self.style == "nanogpt":
            q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
            q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        elif self.style == "timm":
            qkv = self.c_attn(x).reshape(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
        else:  # each head's q, k and v beside each other
            q, k, v = self.c_attn(x).view(B, T, self.n_head, -1).transpose(1, 2).chunk(3, -1)
        if self.by_hand:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))  # type: ignore[index]
            y = F.softmax(att, dim=-1) @ v
        else:
            y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Own(nn.Module):
    """``make(self, x, q, k, v)`` gives the output of all heads from [batch, heads, length, head]."""

    def __init__(self, make: Callable[..., Tensor], **inner: Any) -> None:
        super().__init__()
        self.to_q, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.to_k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.num_heads = HEADS
        for name, value in inner.items():
            setattr(self, name, value)
        self.make = make

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            layer(x).reshape(b, s, self.num_heads, -1).transpose(1, 2)
            for layer in (self.to_q, self.to_k, self.to_v)
        )
        return self.to_out(self.make(self, x, q, k, v, **given).transpose(1, 2).reshape(b, s, -1))


def own(make: Callable[..., Tensor], **inner: Callable[[], Any]) -> Fragment:
    return Fragment(attention=lambda: Own(make, **{name: one() for name, one in inner.items()}))


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def angles(length: int) -> tuple[Tensor, Tensor]:
    at = torch.outer(torch.arange(length).float(), 1.0 / 100 ** (torch.arange(0, HEAD, 2).float() / HEAD))
    at = torch.cat([at, at], -1)
    return at.cos(), at.sin()


def rope_inside(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cos, sin = angles(x.shape[1])
    return sdpa(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)


def rope_given(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return sdpa(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)


def window(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = causal(x.shape[1]) & causal(x.shape[1]).T.roll(3, 1).triu(-3)
    mask = mask | torch.eye(x.shape[1], dtype=torch.bool)
    return sdpa(q, k, v, attn_mask=mask)


def with_mask(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q, k, v, attn_mask=mask)


def linear_attention(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    kv = torch.einsum("bhsd,bhse->bhsde", k, v).cumsum(2)
    z = 1 / (torch.einsum("bhsd,bhsd->bhs", q, k.cumsum(2)) + 1e-6)
    return torch.einsum("bhsd,bhsde,bhs->bhse", q, kv, z)


def by_hand(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / HEAD**0.5
    return torch.einsum("bhij,bhjd->bhid", scores.masked_fill(~causal(x.shape[1]), -1e9).softmax(-1), v)


def persistent(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys and values that are learnt, beside those of the sequence."""
    batch = x.shape[0]
    k = torch.cat([m.mk.expand(batch, -1, -1, -1), k], 2)
    v = torch.cat([m.mv.expand(batch, -1, -1, -1), v], 2)
    mask = F.pad(causal(x.shape[1]), (m.mk.shape[-2], 0), value=True)
    return sdpa(q, k, v, attn_mask=mask)


def cosine(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return sdpa(q * m.scale.exp(), k, v, is_causal=True, scale=1.0)


def relative(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    places = torch.arange(x.shape[1])
    bias = m.table((places[None] - places[:, None]).clamp(-7, 7) + 7).permute(2, 0, 1)[None]
    return sdpa(q, k, v, attn_mask=bias)


def gated(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y = sdpa(q, k, v, is_causal=True)
    return y * m.gate(x).unflatten(-1, (m.num_heads, -1)).transpose(1, 2).sigmoid()


def one_head_after_another(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([sdpa(q[:, i], k[:, i], v[:, i], is_causal=True) for i in range(m.num_heads)], 1)


def head_scale(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True) * m.scale.view(1, -1, 1, 1)


def entropy(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Notes a statistic on itself."""
    y = sdpa(q, k, v, is_causal=True)
    m.last = y.detach().abs().mean()
    return y


def chunked(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Local attention within windows of 4."""
    q, k, v = (t.unflatten(2, (-1, 4)) for t in (q, k, v))
    return sdpa(q, k, v, is_causal=True).flatten(2, 3)


class Multihead(nn.Module):
    def __init__(self, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        self.attn, self.options = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first), options
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        t = x if self.batch_first else x.transpose(0, 1)
        mask = ~causal(x.shape[1])
        y = self.attn(t, t, t, attn_mask=mask, **{"need_weights": False, **self.options})[0]
        return y if self.batch_first else y.transpose(0, 1)


class Encoder(nn.Module):
    """torch's own layer as a block."""

    def __init__(self, block: Block, **options: Any) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, **options)
        self.batch_first = options.get("batch_first", False)
        if hasattr(block, "experts"):
            self.experts = block.experts

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        if self.batch_first:
            x = self.layer(x, src_mask=mask, is_causal=True)
        else:
            x = self.layer(x.transpose(0, 1), src_mask=mask, is_causal=True).transpose(0, 1)
        return x + self.experts(x) if hasattr(self, "experts") else x


class Cross(nn.Module):
    """Attention to a memory that comes as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(6, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
        k, v = (t.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for t in self.kv(memory).chunk(2, -1))
        return self.o(sdpa(q, k, v).transpose(1, 2).flatten(2))


def to_attention(
    make: Callable[[torch.Generator, int], dict[str, Tensor]], **fragment: Any
) -> dict[str, Any]:
    """Further arguments of the model that each block's attention gets."""

    def body(model: Any, x: Tensor, **given: Any) -> Tensor:
        return through(model, x, **given)

    return {"given": make, "body": body, **fragment}


def padding(generator: torch.Generator, rows: int) -> Tensor:
    lengths = torch.randint(6, LENGTH + 1, (rows,), generator=generator)
    return (torch.arange(LENGTH) < lengths[:, None])[:, None, None, :]


def rope_tables(model: Any, x: Tensor) -> Tensor:
    cos, sin = angles(x.shape[1])
    return through(model, x, cos=cos, sin=sin)


ATTENTION: dict[str, Fragment] = {
    "grouped": Fragment(attention=lambda: Grouped(2)),
    "grouped by argument": Fragment(attention=lambda: Grouped(2, by_argument=True)),
    "multi-query": Fragment(attention=lambda: Grouped(1)),
    "nanogpt": Fragment(attention=Fused),
    "timm": Fragment(attention=lambda: Fused("timm")),
    "rope inside": own(rope_inside),
    "rope as arguments": Fragment(attention=lambda: Own(rope_given), body=rope_tables),
    "a mask of the batch": Fragment(
        attention=lambda: Own(with_mask),
        **to_attention(lambda g, rows: {"mask": padding(g, rows) & causal(LENGTH)}),
    ),
    "a mask of positions": Fragment(
        attention=lambda: Own(with_mask), **to_attention(lambda g, rows: {"mask": causal(LENGTH)})
    ),
    "linear attention": own(linear_attention),
    "by hand": own(by_hand),
    "persistent keys": own(persistent, mk=random(1, HEADS, 3, HEAD), mv=random(1, HEADS, 3, HEAD)),
    "cosine of one scale": own(cosine, scale=random(1)),
    "relative positions": own(relative, table=lambda: nn.Embedding(15, HEADS)),
    "head after head": own(one_head_after_another),
    "scale of heads": own(head_scale, scale=random(HEADS)),
    "windows by reshaping": own(chunked),
    "not causal": own(lambda m, x, q, k, v: sdpa(q, k, v)),
    "multihead": Fragment(attention=Multihead),
    "multihead, time first": Fragment(attention=lambda: Multihead(batch_first=False)),
    "multihead with weights": Fragment(attention=lambda: Multihead(need_weights=True)),
    "encoder layer": Fragment(block=lambda b: Encoder(b, batch_first=True, norm_first=True)),
    "encoder layer, time first": Fragment(block=lambda b: Encoder(b)),
    "cross attention": Fragment(
        attention=Cross,
        **to_attention(lambda g, rows: {"memory": torch.randn(rows, 5, 6, generator=g)}),
    ),
    "cross attention to one memory": Fragment(
        attention=Cross,
        **to_attention(lambda g, rows: {"memory": torch.ones(1, 5, 6)}),
        at=(0, 1, 2, 3),
    ),
    "no attention": Fragment(attention=lambda: nn.Linear(WIDTH, WIDTH), loss=mean_loss),
}
