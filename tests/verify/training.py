"""Small models, trained in two ways that are the same in mathematics: one process, and ranks whose sums are ordered
otherwise; with all their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.verify import ItemKind, TraceItem

WIDTH = 16


class Attention(nn.Module):
    """The bias of its keys has a gradient that is zero in mathematics."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.head(self.norm(x + self.out(y)))


class Experts(nn.Module):
    """Each token goes to the better of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 10) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best, chosen = scores.topk(2, dim=-1)
        every = torch.stack([expert(x) for expert in self.experts], dim=-2)
        picked = every.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, every.shape[-1]))
        return (picked * best.unsqueeze(-1)).sum(-2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def normalised() -> nn.Module:
    """The biases before its normalisations have gradients that are zero in mathematics."""
    return nn.Sequential(
        nn.Linear(WIDTH, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.LayerNorm(32),
        nn.Linear(32, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "attention": Attention,
    "normalised": normalised,
    "experts": Experts,
}
OPTIMIZERS: dict[str, Callable[[Iterator[Tensor]], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@dataclass(frozen=True)
class Setup:
    """What is trained.

    Attributes:
        plant: Changes gradients before the optimizer's step: (step, name -> gradient).
    """

    model: str
    optimizer: str
    seed: int = 0
    data_ranks: int = 3
    steps: int = 3
    scale: float = 1.0
    plant: Callable[[int, dict[str, Tensor]], None] = field(default=lambda step, gradients: None)


def train(
    setup: Setup,
    *,
    half: torch.dtype | None = None,
    disturbed: bool = False,
    reordered: bool = False,
    change: Callable[[TraceItem, Tensor], Tensor] = lambda item, gradient: gradient,
) -> dict[TraceItem, Tensor]:
    """All tensors of a run, as one process would record them.

    Args:
        disturbed: Weights and inputs are off by one rounding step.
        reordered: Products, and gradients of data ranks, are added up in another order.
        change: Gradients of outputs, as backward comes to them.
    """
    torch.manual_seed(setup.seed)
    model = MODELS[setup.model]()
    optimizer = OPTIMIZERS[setup.optimizer](model.parameters())
    batches = [_batch(setup) for _ in range(setup.steps * setup.data_ranks)]
    noise = torch.Generator().manual_seed(setup.seed + 1)
    tensors: dict[TraceItem, Tensor] = {}
    names = {module: name for name, module in model.named_modules()}
    parameters = dict(model.named_parameters())
    if disturbed:
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.copy_(_off(parameter, noise))
    tensors |= {TraceItem(0, ItemKind.WEIGHT, name): one.detach().clone() for name, one in parameters.items()}
    for step in range(1, setup.steps + 1):
        gradients = {name: torch.zeros_like(one) for name, one in parameters.items()}
        of_ranks = []
        for rank in range(setup.data_ranks):
            x, y = batches[(step - 1) * setup.data_ranks + rank]
            x = _off(x, noise) if disturbed else x
            with (
                _hooked(names, tensors, step, rank, change),
                _split_products() if reordered else nullcontext(),
            ):
                with torch.autocast("cpu", half) if half else nullcontext():
                    out = model(x)
                loss = _loss(out.float(), y)
                loss.backward()
            tensors[TraceItem(step, ItemKind.LOSS, "", data_rank=rank)] = loss.detach()
            of_ranks.append(
                {name: one.grad.clone() for name, one in parameters.items() if one.grad is not None}
            )
            model.zero_grad()
        for of_rank in reversed(of_ranks) if reordered else of_ranks:
            for name, gradient in of_rank.items():
                gradients[name] += gradient if reordered else gradient / setup.data_ranks
        if reordered:
            gradients = {name: one / setup.data_ranks for name, one in gradients.items()}
        setup.plant(step, gradients)
        for name, parameter in reversed(parameters.items()):
            parameter.grad = gradients[name].clone()
            tensors[TraceItem(step, ItemKind.GRADIENT, name)] = gradients[name]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        tensors[TraceItem(step, ItemKind.NORM, "")] = norm.clone()
        for name, parameter in parameters.items():
            tensors[TraceItem(step, ItemKind.CLIPPED, name)] = parameter.grad.clone()  # type: ignore[union-attr]
        tensors[TraceItem(step, ItemKind.RATE, "")] = torch.tensor(
            optimizer.param_groups[0]["lr"], dtype=torch.float64
        )
        before = {name: one.detach().clone() for name, one in parameters.items()}
        optimizer.step()
        model.zero_grad()
        for name, parameter in parameters.items():
            tensors[TraceItem(step, ItemKind.UPDATE, name)] = parameter.detach() - before[name]
        for name, buffer in model.named_buffers():
            tensors[TraceItem(step, ItemKind.BUFFER, name)] = buffer.clone()
    return tensors


def _batch(setup: Setup) -> tuple[Tensor, Tensor]:
    shape = (8, WIDTH) if setup.model in ("normalised", "mlp") else (4, 6, WIDTH)
    x = setup.scale * torch.randn(shape)
    return x, torch.randint(10, shape[:-1])


def _loss(out: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(out.reshape(-1, 10), y.reshape(-1))


def _off(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Each element one rounding step up or down."""
    side = torch.randint(2, tensor.shape, generator=generator) * 2 - 1
    return torch.nextafter(tensor, side * torch.tensor(float("inf")))


@contextmanager
def _hooked(
    names: dict[nn.Module, str],
    tensors: dict[TraceItem, Tensor],
    step: int,
    rank: int,
    change: Callable[[TraceItem, Tensor], Tensor],
) -> Iterator[None]:
    def take(module: nn.Module, _: object, output: Tensor | tuple[Tensor, object]) -> None:
        result = output[0] if isinstance(output, tuple) else output
        tensors[TraceItem(step, ItemKind.OUTPUT, names[module], data_rank=rank)] = result.detach().clone()
        place = TraceItem(step, ItemKind.OUTPUT_GRADIENT, names[module], data_rank=rank)

        def take_gradient(gradient: Tensor) -> Tensor:
            tensors[place] = change(place, gradient.detach().clone())
            return tensors[place].clone()

        result.register_hook(take_gradient)

    handles = [module.register_forward_hook(take) for module in names]
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def _split_products() -> Iterator[None]:
    """Linear layers that add up two halves of their products, as ranks of a row-parallel layer do."""
    whole = functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        cut = weight.shape[1] // 2
        product = whole(x[..., cut:], weight[:, cut:]) + whole(x[..., :cut], weight[:, :cut])
        return product if bias is None else product + bias

    with mock.patch.object(functional, "linear", linear):
        yield
