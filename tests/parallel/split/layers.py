"""What people write in place of an MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from tests.parallel.split.host import HIDDEN, WIDTH, Fragment


class Layer(nn.Module):
    """Attributes, and a function of them."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **inner: Any) -> None:
        super().__init__()
        for name, value in inner.items():
            setattr(self, name, value)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def up(width: int = HIDDEN, **options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, width, **options)


def down(width: int = HIDDEN, **options: Any) -> nn.Linear:
    return nn.Linear(width, WIDTH, **options)


def mlp(function: Callable[[Any, Tensor], Tensor], **inner: Callable[[], Any]) -> Fragment:
    def make() -> nn.Module:
        return Layer(function, **{name: one() for name, one in inner.items()})

    return Fragment(mlp=make)


def pair(between: Callable[[Any, Tensor, Tensor], Tensor], **inner: Callable[[], Any]) -> Fragment:
    return mlp(lambda m, x: m.down(between(m, x, m.up(x))), up=up, down=down, **inner)


def pruned(layer: nn.Linear) -> nn.Linear:
    prune.l1_unstructured(layer, "weight", amount=0.3)
    return layer


def random(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)


class SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu().square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x.relu() * gradient


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.factor, None


class NormalisedGradient(torch.autograd.Function):
    """Its backward looks at all elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / (gradient.norm() + 1e-3) * 1e-2


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base, self.scaling = base.requires_grad_(False), 2.0
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scaling * self.lora_b(self.lora_a(x))


class LowRank(nn.Module):
    """A parametrization: the weight and a low-rank change of it."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(rows, 4) * 0.1), nn.Parameter(torch.randn(4, columns) * 0.1)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def with_low_rank(layer: nn.Linear) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", LowRank(*layer.weight.shape))


def quantised(weight: Tensor) -> Tensor:
    """A straight-through estimate of a ternary weight (BitNet)."""
    scale = weight.abs().mean().clamp(min=1e-5)
    return weight + ((weight / scale).round().clamp(-1, 1) * scale - weight).detach()


class BitLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, quantised(self.weight), self.bias)


class RowBitLinear(nn.Linear):
    """With a scale of each output feature."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.abs().mean(1, keepdim=True)
        weight = self.weight + (self.weight.sign() * scale - self.weight).detach()
        return F.linear(x, weight, self.bias)


class CosineLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1), self.bias)


class FlatMixture(nn.Module):
    """Experts one after the other, with the rows that chose them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(up(), nn.SiLU(), down()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(rows).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            row, choice = torch.where(chosen == index)
            out.index_add_(0, row, expert(rows[row]) * weights[row, choice, None])
        return out.view_as(x)


class CapacityMixture(FlatMixture):
    """Each expert takes its best rows of all."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        scores = self.gate(rows).softmax(-1)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            weight, row = scores[:, index].topk(rows.shape[0] // 4)
            out = out.index_add(0, row, expert(rows[row]) * weight[:, None])
        return out.view_as(x)


def soft_mixture(m: Any, x: Tensor) -> Tensor:
    hidden = F.gelu(torch.einsum("bsd,edh->bseh", x, m.w_in))
    out = torch.einsum("bseh,ehd->bsed", hidden, m.w_out)
    return (out * m.gate(x).softmax(-1)[..., None]).sum(-2)


def switch(m: Any, x: Tensor) -> Tensor:
    """The best expert by a mask."""
    probabilities = m.gate(x).softmax(-1)
    best = F.one_hot(probabilities.argmax(-1), 4) * probabilities
    return sum(expert(x) * best[..., i : i + 1] for i, expert in enumerate(m.experts))  # type: ignore[return-value]


def mixture_of_depths(m: Any, x: Tensor) -> Tensor:
    score = m.score(x)
    chosen = score.squeeze(-1).topk(x.shape[1] // 2, dim=1).indices.sort(1).values
    index = chosen[..., None].expand(-1, -1, x.shape[-1])
    out = m.down(F.gelu(m.up(x.gather(1, index)))) * score.gather(1, chosen[..., None]).sigmoid()
    return torch.zeros_like(x).scatter(1, index, out)


def spatial_gate(m: Any, x: Tensor) -> Tensor:
    u, v = F.gelu(m.up(x)).chunk(2, -1)
    return m.down(u * m.spatial(m.norm(v).transpose(1, 2)).transpose(1, 2))


def response_norm(m: Any, x: Tensor) -> Tensor:
    h = F.gelu(m.up(x))
    g = h.norm(p=2, dim=1, keepdim=True)
    return m.down(m.gamma * (h * (g / (g.mean(-1, keepdim=True) + 1e-6))) + h)


def squeeze_excite(m: Any, x: Tensor) -> Tensor:
    return x * m.down(F.relu(m.up(x.mean(1)))).sigmoid().unsqueeze(1)


def depthwise(m: Any, x: Tensor) -> Tensor:
    return m.down(F.silu(m.conv(m.up(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)))


def memory(m: Any, x: Tensor) -> Tensor:
    """The values of the best keys."""
    weights, index = (x @ m.keys.T).topk(3, dim=-1)
    return (m.values(index) * weights.softmax(-1)[..., None]).sum(-2)


def codebook(m: Any, x: Tensor) -> Tensor:
    z = m.up(x)
    index = torch.cdist(z.flatten(0, 1), m.book.weight).argmin(-1)
    q = m.book(index).view_as(z)
    return m.down(z + (q - z).detach() + (q - q.detach()))


def hyper(m: Any, x: Tensor) -> Tensor:
    weight = m.make(m.code).view(WIDTH, WIDTH)
    return F.linear(x, weight)


def scan(m: Any, x: Tensor) -> Tensor:
    """A gated recurrence, step by step."""
    f, i = m.f(x).sigmoid(), m.i(x)
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = f[:, t] * state + (1 - f[:, t]) * i[:, t]
        out.append(state)
    return m.o(torch.stack(out, 1))


def rbf(m: Any, x: Tensor) -> Tensor:
    basis = torch.exp(-((x.unsqueeze(-1) - m.grid) ** 2))
    return m.out(basis.flatten(-2))


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def own_checkpoint(reentrant: bool) -> Callable[[Any, Tensor], Tensor]:
    def forward(m: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda t: m.down(F.gelu(m.up(t))), x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    return forward


def modern(m: Any, x: Tensor) -> Tensor:
    first, second = m.w12(x).chunk(2, dim=-1)
    return m.w3(F.silu(first) * second)


def in_place_steps(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    h.mul_(0.5).add_(0.1)
    h = F.relu_(h)
    out = m.down(h)
    out += x
    return out


def functional(m: Any, x: Tensor) -> Tensor:
    weights = {"weight": m.up.weight * 0.9, "bias": m.up.bias + 0.1}
    return m.down(F.gelu(torch.func.functional_call(m.up, weights, (x,))))


def penalty(m: Any, x: Tensor) -> Tensor:
    """A step of gradient descent on an energy."""
    with torch.enable_grad():
        y = x if x.requires_grad else x.requires_grad_()
        energy = m.down(torch.tanh(m.up(y))).square().sum()
        (gradient,) = torch.autograd.grad(energy, y, create_graph=True)
    return -0.1 * gradient


def unpadded(m: Any, x: Tensor) -> Tensor:
    """Rows above a score alone go through the layers."""
    keep = x[..., 0] > 0
    out = torch.zeros_like(x)
    out[keep] = m.down(F.gelu(m.up(x[keep])))
    return out


def experts_list() -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(up(), nn.GELU(), down()) for _ in range(4))


LAYERS: dict[str, Fragment] = {
    "swiglu in one": mlp(modern, w12=lambda: up(2 * HIDDEN), w3=down),
    "sequential": Fragment(
        mlp=lambda: nn.Sequential(up(), nn.GELU(), nn.Dropout(0.0), down(), nn.Dropout(0.0))
    ),
    "norm of hidden features": pair(lambda m, x, h: m.norm(F.gelu(h)), norm=lambda: nn.LayerNorm(HIDDEN)),
    "rms of hidden features": pair(lambda m, x, h: rms(F.gelu(h)) * m.g, g=random(HIDDEN)),
    "layer scale": mlp(lambda m, x: m.g * m.down(F.gelu(m.up(x))), up=up, down=down, g=random(WIDTH)),
    "rezero": mlp(lambda m, x: m.alpha * m.down(F.gelu(m.up(x))), up=up, down=down, alpha=random(1)),
    "global response norm": mlp(response_norm, up=up, down=down, gamma=random(HIDDEN)),
    "squeeze and excite": mlp(squeeze_excite, up=lambda: up(8), down=lambda: down(8)),
    "depthwise convolution": mlp(
        depthwise, up=up, down=down, conv=lambda: nn.Conv1d(HIDDEN, HIDDEN, 3, padding=2, groups=HIDDEN)
    ),
    "convolutions of one": mlp(
        lambda m, x: m.b(F.gelu(m.a(x.mT))).mT,
        a=lambda: nn.Conv1d(WIDTH, HIDDEN, 1),
        b=lambda: nn.Conv1d(HIDDEN, WIDTH, 1),
    ),
    "convolution of three": mlp(
        lambda m, x: m.b(F.gelu(m.a(x.mT))).mT,
        a=lambda: nn.Conv1d(WIDTH, HIDDEN, 3, padding=1),
        b=lambda: nn.Conv1d(HIDDEN, WIDTH, 1),
    ),
    "experts by index_add": Fragment(mlp=FlatMixture),
    "experts that choose rows": Fragment(mlp=CapacityMixture),
    "soft mixture": mlp(
        soft_mixture, gate=lambda: up(4), w_in=random(4, WIDTH, HIDDEN), w_out=random(4, HIDDEN, WIDTH)
    ),
    "best of experts": mlp(switch, gate=lambda: up(4), experts=experts_list),
    "mixture of depths": mlp(mixture_of_depths, up=up, down=down, score=lambda: up(1)),
    "pruned": Fragment(mlp=lambda: nn.Sequential(pruned(up()), nn.GELU(), down())),
    "in vmap": mlp(lambda m, x: torch.func.vmap(lambda row: m.down(F.gelu(m.up(row))))(x), up=up, down=down),
    "lora": Fragment(mlp=lambda: nn.Sequential(LoRA(up()), nn.GELU(), LoRA(down()))),
    "lora as a parametrization": mlp(
        lambda m, x: m.down(F.gelu(m.up(x))),
        up=lambda: with_low_rank(up()),
        down=lambda: with_low_rank(down()),
    ),
    "weight norm": mlp(
        lambda m, x: m.down(F.gelu(m.up(x))),
        up=lambda: parametrizations.weight_norm(up()),
        down=lambda: parametrizations.weight_norm(down()),
    ),
    "spectral norm": mlp(
        lambda m, x: m.down(F.gelu(m.up(x))),
        up=lambda: parametrizations.spectral_norm(up()),
        down=down,
    ),
    "orthogonal": mlp(
        lambda m, x: m.turn(m.down(F.gelu(m.up(x)))),
        up=up,
        down=down,
        turn=lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH, bias=False)),
    ),
    "ternary weights": mlp(
        lambda m, x: m.down(F.gelu(m.up(x))),
        up=lambda: BitLinear(WIDTH, HIDDEN),
        down=lambda: BitLinear(HIDDEN, WIDTH),
    ),
    "binary weights": mlp(
        lambda m, x: m.down(F.gelu(m.up(x))),
        up=lambda: RowBitLinear(WIDTH, HIDDEN),
        down=lambda: RowBitLinear(HIDDEN, WIDTH),
    ),
    "cosine linear": mlp(
        lambda m, x: m.down(F.gelu(m.up(x))),
        up=lambda: CosineLinear(WIDTH, HIDDEN),
        down=lambda: CosineLinear(HIDDEN, WIDTH),
    ),
    "8-bit activations": pair(
        lambda m, x, h: h + ((h / (s := h.abs().amax(-1, keepdim=True) / 127)).round() * s - h).detach()
    ),
    "own squared relu": pair(lambda m, x, h: SquaredReLU.apply(h)),
    "scaled gradient": pair(lambda m, x, h: F.gelu(ScaledGradient.apply(h, 0.5))),
    "reversed gradient": mlp(
        lambda m, x: m.down(F.gelu(m.up(ScaledGradient.apply(x, -0.3)))), up=up, down=down
    ),
    "normalised gradient": pair(lambda m, x, h: F.gelu(NormalisedGradient.apply(h))),
    "clipped gradient": pair(lambda m, x, h: _with_hook(F.gelu(h), lambda g: g.clamp(-1e-3, 1e-3))),
    "gradient over its norm": pair(lambda m, x, h: _with_hook(F.gelu(h), lambda g: g / (1 + 100 * g.norm()))),
    "checkpoint": mlp(own_checkpoint(False), up=up, down=down),
    "reentrant checkpoint": mlp(own_checkpoint(True), up=up, down=down),
    "einsum of parameters": mlp(
        lambda m, x: torch.einsum("bsh,hd->bsd", F.gelu(torch.einsum("bsd,dh->bsh", x, m.a)), m.b),
        a=random(WIDTH, HIDDEN),
        b=random(HIDDEN, WIDTH),
    ),
    "parameter list": mlp(
        lambda m, x: F.gelu(x @ m.ws[0]) @ m.ws[1],
        ws=lambda: nn.ParameterList([random(WIDTH, HIDDEN)(), random(HIDDEN, WIDTH)()]),
    ),
    "parameter dictionary": mlp(
        lambda m, x: m.down(F.gelu(m.up(x)) * m.p["scale"] + m.p["shift"]),
        up=up,
        down=down,
        p=lambda: nn.ParameterDict({"scale": random(1)(), "shift": random(HIDDEN)()}),
    ),
    "module dictionary": mlp(
        lambda m, x: m.parts["down"](m.parts["act"](m.parts["up"](x))),
        parts=lambda: nn.ModuleDict({"up": up(), "act": nn.GELU(), "down": down()}),
    ),
    "bilinear": mlp(lambda m, x: m.b(x, x.tanh()), b=lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH)),
    "maxout": mlp(
        lambda m, x: m.down(m.up(x).unflatten(-1, (HIDDEN, 2)).amax(-1)), up=lambda: up(2 * HIDDEN), down=down
    ),
    "interleaved glu": mlp(
        lambda m, x: m.down((h := m.up(x))[..., ::2].sigmoid() * h[..., 1::2]),
        up=lambda: up(2 * HIDDEN),
        down=down,
    ),
    "one layer twice": mlp(lambda m, x: m.fc(F.gelu(m.fc(x))), fc=lambda: nn.Linear(WIDTH, WIDTH)),
    "tied up and down": mlp(lambda m, x: F.linear(F.gelu(m.up(x)), m.up.weight.t()), up=up),
    "highway": mlp(
        lambda m, x: (t := m.t(x).sigmoid()) * m.down(F.gelu(m.up(x))) + (1 - t) * x,
        up=up,
        down=down,
        t=lambda: up(WIDTH),
    ),
    "token mixing": mlp(
        lambda m, x: m.b(F.gelu(m.a(x.transpose(1, 2)))).transpose(1, 2),
        a=lambda: nn.Linear(12, 24),
        b=lambda: nn.Linear(24, 12),
    ),
    "spatial gating": mlp(
        spatial_gate,
        up=lambda: up(2 * HIDDEN),
        down=down,
        norm=lambda: nn.LayerNorm(HIDDEN),
        spatial=lambda: nn.Linear(12, 12),
    ),
    "fourier": mlp(lambda m, x: torch.fft.fft2(x).real),
    "radial basis": mlp(
        rbf, grid=lambda: nn.Parameter(torch.linspace(-2, 2, 4)), out=lambda: nn.Linear(4 * WIDTH, WIDTH)
    ),
    "prelu of each feature": pair(lambda m, x, h: m.act(h.mT).mT, act=lambda: nn.PReLU(HIDDEN)),
    "batch norm of features": Fragment(
        mlp=lambda: Layer(
            lambda m, x: m.down(F.relu(m.bn(m.up(x).mT).mT)), up=up(), down=down(), bn=nn.BatchNorm1d(HIDDEN)
        ),
        at=(1,),
    ),
    "instance norm": pair(lambda m, x, h: F.instance_norm(h.mT).mT),
    "group norm of features": pair(
        lambda m, x, h: m.gn(h.flatten(0, 1)).view_as(h), gn=lambda: nn.GroupNorm(4, HIDDEN)
    ),
    "memory of keys": mlp(memory, keys=random(24, WIDTH), values=lambda: nn.Embedding(24, WIDTH)),
    "codebook": mlp(codebook, up=lambda: up(8), down=lambda: down(8), book=lambda: nn.Embedding(12, 8)),
    "adapter on a frozen MLP": mlp(
        lambda m, x: (y := m.base(x)) + m.b(F.relu(m.a(y))),
        base=lambda: nn.Sequential(up(), nn.GELU(), down()).requires_grad_(False),
        a=lambda: up(4),
        b=lambda: down(4),
    ),
    "hypernetwork": mlp(hyper, make=lambda: nn.Linear(6, WIDTH * WIDTH), code=random(6)),
    "recurrence": mlp(scan, f=lambda: up(WIDTH), i=lambda: up(WIDTH), o=lambda: up(WIDTH)),
    "gru": mlp(lambda m, x: m.rnn(x)[0], rnn=lambda: nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "lstm, time first": mlp(
        lambda m, x: m.rnn(x.transpose(0, 1))[0].transpose(0, 1), rnn=lambda: nn.LSTM(WIDTH, WIDTH)
    ),
    "gru cell": mlp(lambda m, x: m.cell(x.flatten(0, 1)).view_as(x), cell=lambda: nn.GRUCell(WIDTH, WIDTH)),
    "in place": mlp(in_place_steps, up=up, down=down),
    "functional call": mlp(functional, up=up, down=down),
    "gradient inside": mlp(penalty, up=up, down=down),
    "chosen rows": mlp(unpadded, up=up, down=down),
    "three layers": mlp(
        lambda m, x: m.c(F.gelu(m.b(F.gelu(m.a(x))))), a=up, b=lambda: nn.Linear(HIDDEN, HIDDEN), c=down
    ),
    "branches": mlp(
        lambda m, x: torch.cat([m.a(x).relu(), m.b(x).tanh()], -1) @ m.w,
        a=lambda: up(8),
        b=lambda: up(24),
        w=random(32, WIDTH),
    ),
    "odd width": mlp(lambda m, x: m.down(F.gelu(m.up(x))), up=lambda: up(31), down=lambda: down(31)),
    "cumulative softmax": pair(lambda m, x, h: h.cumsum(-1) / HIDDEN),
    "noise of nothing": pair(lambda m, x, h: F.gelu(h) + 0.0 * torch.randn_like(h)),
    "double": pair(lambda m, x, h: F.gelu(h.double()).float()),
    "complex": pair(
        lambda m, x, h: torch.view_as_real(
            torch.view_as_complex(h.unflatten(-1, (-1, 2))) * (0.6 + 0.8j)
        ).flatten(-2)
    ),
    "shuffled channels": pair(lambda m, x, h: F.gelu(h).unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2)),
    "sorted features": pair(lambda m, x, h: h.sort(-1).values),
    "k winners": pair(lambda m, x, h: h * (h >= h.kthvalue(HIDDEN // 2, -1, keepdim=True).values)),
    "number from a tensor": pair(lambda m, x, h: h * float(x.detach().abs().max())),
    "branch on values": pair(lambda m, x, h: F.gelu(h) if x.mean() > -100 else h),
    "branch on the batch's values": pair(lambda m, x, h: F.gelu(h) if x[..., 0].mean() > 0 else h.tanh()),
    "weight of the embedding's kind": mlp(
        lambda m, x: x * m.w.weight.mean(0), w=lambda: nn.Embedding(6, WIDTH)
    ),
}


def _with_hook(x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    if x.requires_grad:
        x.register_hook(hook)
    return x
