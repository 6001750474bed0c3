"""What people write in place of an MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
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


def quantised(weight: Tensor) -> Tensor:
    """A straight-through estimate of a ternary weight (BitNet)."""
    scale = weight.abs().mean().clamp(min=1e-5)
    return weight + ((weight / scale).round().clamp(-1, 1) * scale - weight).detach()


class BitLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, quantised(self.weight), self.bias)


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


def squeeze_excite(m: Any, x: Tensor) -> Tensor:
    return x * m.down(F.relu(m.up(x.mean(1)))).sigmoid().unsqueeze(1)


def memory(m: Any, x: Tensor) -> Tensor:
    """The values of the best keys."""
    weights, index = (x @ m.keys.T).topk(3, dim=-1)
    return (m.values(index) * weights.softmax(-1)[..., None]).sum(-2)


def codebook(m: Any, x: Tensor) -> Tensor:
    z = m.up(x)
    index = torch.cdist(z.flatten(0, 1), m.book.weight).argmin(-1)
    q = m.book(index).view_as(z)
    return m.down(z + (q - z).detach() + (q - q.detach()))


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


LAYERS: dict[str, Fragment] = {
    "swiglu in one": mlp(modern, w12=lambda: up(2 * HIDDEN), w3=down),
    "norm of hidden features": pair(lambda m, x, h: m.norm(F.gelu(h)), norm=lambda: nn.LayerNorm(HIDDEN)),
    "layer scale": mlp(lambda m, x: m.g * m.down(F.gelu(m.up(x))), up=up, down=down, g=random(WIDTH)),
    "squeeze and excite": mlp(squeeze_excite, up=lambda: up(8), down=lambda: down(8)),
    "convolution of three": mlp(
        lambda m, x: m.b(F.gelu(m.a(x.mT))).mT,
        a=lambda: nn.Conv1d(WIDTH, HIDDEN, 3, padding=1),
        b=lambda: nn.Conv1d(HIDDEN, WIDTH, 1),
    ),
    "experts by index_add": Fragment(mlp=FlatMixture),
    "experts that choose rows": Fragment(mlp=CapacityMixture),
    "pruned": Fragment(mlp=lambda: nn.Sequential(pruned(up()), nn.GELU(), down())),
    "in vmap": mlp(lambda m, x: torch.func.vmap(lambda row: m.down(F.gelu(m.up(row))))(x), up=up, down=down),
    "lora": Fragment(mlp=lambda: nn.Sequential(LoRA(up()), nn.GELU(), LoRA(down()))),
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
    "own squared relu": pair(lambda m, x, h: SquaredReLU.apply(h)),
    "reversed gradient": mlp(
        lambda m, x: m.down(F.gelu(m.up(ScaledGradient.apply(x, -0.3)))), up=up, down=down
    ),
    "normalised gradient": pair(lambda m, x, h: F.gelu(NormalisedGradient.apply(h))),
    "gradient over its norm": pair(lambda m, x, h: _with_hook(F.gelu(h), lambda g: g / (1 + 100 * g.norm()))),
    "checkpoint": mlp(own_checkpoint(False), up=up, down=down),
    "reentrant checkpoint": mlp(own_checkpoint(True), up=up, down=down),
    "einsum of parameters": mlp(
        lambda m, x: torch.einsum("bsh,hd->bsd", F.gelu(torch.einsum("bsd,dh->bsh", x, m.a)), m.b),
        a=random(WIDTH, HIDDEN),
        b=random(HIDDEN, WIDTH),
    ),
    "interleaved glu": mlp(
        lambda m, x: m.down((h := m.up(x))[..., ::2].sigmoid() * h[..., 1::2]),
        up=lambda: up(2 * HIDDEN),
        down=down,
    ),
    "one layer twice": mlp(lambda m, x: m.fc(F.gelu(m.fc(x))), fc=lambda: nn.Linear(WIDTH, WIDTH)),
    "tied up and down": mlp(lambda m, x: F.linear(F.gelu(m.up(x)), m.up.weight.t()), up=up),
    "token mixing": mlp(
        lambda m, x: m.b(F.gelu(m.a(x.transpose(1, 2)))).transpose(1, 2),
        a=lambda: nn.Linear(12, 24),
        b=lambda: nn.Linear(24, 12),
    ),
    "fourier": mlp(lambda m, x: torch.fft.fft2(x).real),
    "batch norm of features": Fragment(
        mlp=lambda: Layer(
            lambda m, x: m.down(F.relu(m.bn(m.up(x).mT).mT)), up=up(), down=down(), bn=nn.BatchNorm1d(HIDDEN)
        ),
        at=(1,),
    ),
    "group norm of features": pair(
        lambda m, x, h: m.gn(h.flatten(0, 1)).view_as(h), gn=lambda: nn.GroupNorm(4, HIDDEN)
    ),
    "codebook": mlp(codebook, up=lambda: up(8), down=lambda: down(8), book=lambda: nn.Embedding(12, 8)),
    "gru": mlp(lambda m, x: m.rnn(x)[0], rnn=lambda: nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "in place": mlp(in_place_steps, up=up, down=down),
    "functional call": mlp(functional, up=up, down=down),
    "gradient inside": mlp(penalty, up=up, down=down),
    "chosen rows": mlp(unpadded, up=up, down=down),
    "odd width": mlp(lambda m, x: m.down(F.gelu(m.up(x))), up=lambda: up(31), down=lambda: down(31)),
    "double": pair(lambda m, x, h: F.gelu(h.double()).float()),
    "k winners": pair(lambda m, x, h: h * (h >= h.kthvalue(HIDDEN // 2, -1, keepdim=True).values)),
    "number from a tensor": pair(lambda m, x, h: h * float(x.detach().abs().max())),
    "branch on the batch's values": pair(lambda m, x, h: F.gelu(h) if x[..., 0].mean() > 0 else h.tanh()),
}


def _with_hook(x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    if x.requires_grad:
        x.register_hook(hook)
    return x
