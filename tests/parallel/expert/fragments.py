"""What people write with mixtures of experts: models, and loops that train them. Each runs split and in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import LockstepError
from lockstep.nn import MixtureOfExperts, load_balance_loss, router_z_loss
from lockstep.parallel.expert import Routing

WIDTH, HIDDEN, EXPERTS, ROWS, LENGTH, STEPS = 8, 12, 4, 8, 3, 2


def mixture(**options: Any) -> MixtureOfExperts:
    return MixtureOfExperts(WIDTH, HIDDEN, **{"num_experts": EXPERTS, **options})


Forward = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """``forward`` is that of the fragment, between two linear layers, and returns outputs [rows, length, width]."""

    def __init__(self, parts: dict[str, nn.Module], forward: Forward) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleDict(parts)
        self.fragment = forward

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.fragment(self, self.first(rows)))


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))


def squares(model: nn.Module, outputs: Tensor, rows: Tensor) -> Tensor:
    return (outputs - rows.roll(1, -1)).square().mean()


def balanced(model: nn.Module, outputs: Tensor, rows: Tensor) -> Tensor:
    return squares(model, outputs, rows) + 0.1 * load_balance_loss(model) + 0.01 * router_z_loss(model)


@dataclass(frozen=True)
class Cell:
    """``change``: what is done to the model before it is prepared; ``refused``: what the refusal says."""

    parts: Callable[[], dict[str, nn.Module]] = lambda: {"moe": mixture()}
    forward: Forward = lambda m, x: x + m.parts["moe"](x)
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = squares
    change: Callable[[nn.Module], None] = lambda model: None
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, 0.1)
    words: str = ""
    clip: float = 0.0
    accumulation: int = 1
    tolerance: float = 2e-5
    settings: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


# -- parts and forwards ------------------------------------------------------------------------------------------


def two() -> dict[str, nn.Module]:
    return {"a": mixture(), "b": mixture(top_k=1)}


def one_after_the_other(m: Model, x: Tensor) -> Tensor:
    x = x + m.parts["a"](x)
    return x + m.parts["b"](x)


def in_list() -> dict[str, nn.Module]:
    return {"layers": nn.ModuleList([mixture(), nn.Linear(WIDTH, WIDTH), mixture()])}


def through_list(m: Model, x: Tensor) -> Tensor:
    for layer in m.parts["layers"]:
        x = x + layer(x)
    return x


class SoftRouter(nn.Module):
    """A router of the user's own: another network, gates by sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, EXPERTS))

    def forward(self, tokens: Tensor) -> Routing:
        logits = self.layers(tokens)
        chosen = logits.detach().sort(dim=-1, descending=True, stable=True).indices[:, :2]
        return Routing(logits, logits.softmax(-1), logits.gather(1, chosen).sigmoid(), chosen)


def own_router() -> dict[str, nn.Module]:
    layer = mixture()
    layer.router = SoftRouter()
    return {"moe": layer}


def tied_modules() -> dict[str, nn.Module]:
    parts = {"a": mixture(), "b": mixture()}
    parts["b"].experts = parts["a"].experts
    return parts


def tied_weights() -> dict[str, nn.Module]:
    parts = {"a": mixture(), "b": mixture()}
    parts["b"].experts.weight_in = parts["a"].experts.weight_in
    return parts


def twice(m: Model, x: Tensor) -> Tensor:
    layer = m.parts["moe"]
    return x + layer(x) + layer(x.tanh())


def without_padding(m: Model, x: Tensor) -> Tensor:
    """Tokens of which there are other numbers on each rank."""
    valid = x[..., 0] > 0.2
    out = x.clone()
    out[valid] = x[valid] + m.parts["moe"](x[valid])
    return out


FIRST = [True]
"""Whether this process is rank 0, or the only one."""


def rarely(m: Model, x: Tensor) -> Tensor:
    return x + m.parts["moe"](x) if FIRST[0] else x


def in_another_order(m: Model, x: Tensor) -> Tensor:
    first, second = ("a", "b") if FIRST[0] else ("b", "a")
    return x + m.parts[second](m.parts[first](x))


class OwnExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, rows: Tensor, per_expert: list[int]) -> Tensor:
        return torch.cat(
            [layer(part) for layer, part in zip(self.layers, rows.split(per_expert), strict=True)]
        )


def own_experts() -> dict[str, nn.Module]:
    layer = mixture()
    layer.experts = OwnExperts()
    return {"moe": layer}


class Side(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def used_elsewhere() -> dict[str, nn.Module]:
    layer = mixture()
    return {"moe": layer, "side": Side(layer.experts.weight_in)}


def lora_in_experts() -> dict[str, nn.Module]:
    """Low-rank factors of each expert beside its weights, in ``experts`` itself."""
    layer = mixture()
    layer.experts.register_parameter("lora_in", nn.Parameter(torch.randn(2, WIDTH)))
    return {"moe": layer}


def gradient_penalty(model: Any, outputs: Tensor, rows: Tensor) -> Tensor:
    x = rows.clone().requires_grad_()
    of_all = model(x).square().sum() + load_balance_loss(model) / (ROWS / len(rows))
    (gradient,) = torch.autograd.grad(of_all, x, create_graph=True)
    return squares(model, outputs, rows) + 0.01 * gradient.square().mean()


CELLS: dict[str, Cell] = {
    "plain": Cell(),
    "two of a dictionary": Cell(two, one_after_the_other, balanced),
    "called twice, balanced": Cell(forward=twice, loss=balanced),
    "tied modules": Cell(tied_modules, one_after_the_other, balanced),
    "tied weights": Cell(tied_weights, one_after_the_other),
    "own router": Cell(own_router, loss=balanced),
    "lora in experts": Cell(
        lora_in_experts, refused="'parts.moe.experts.lora_in' .* must have one row for each"
    ),
    "activation=full": Cell(in_list, through_list, balanced, words="activation=full"),
    "ignored tokens": Cell(forward=without_padding),
    "capacity 0.5": Cell(lambda: {"moe": mixture(capacity_factor=0.5)}, loss=balanced),
    "not divisible": Cell(lambda: {"moe": mixture(num_experts=3)}, refused="3 experts, which do not divide"),
    "no mixture": Cell(lambda: {"moe": nn.Linear(WIDTH, WIDTH)}, refused="no MixtureOfExperts"),
    "bf16": Cell(settings={"mixed_precision": "bf16"}, tolerance=0.05),
    "gradient penalty": Cell(loss=gradient_penalty),
    "accumulated, clipped": Cell(accumulation=2, clip=0.1, loss=balanced),
    "adafactor": Cell(optimizer=lambda p: torch.optim.Adafactor(p, 1e-2), refused="not known to update each"),
    "batch norm": Cell(
        lambda: {"moe": mixture(), "norm": nn.BatchNorm1d(LENGTH)},
        lambda m, x: x + m.parts["moe"](m.parts["norm"](x)),
        words="sync_batchnorm",
    ),
    "own experts": Cell(own_experts, refused="experts of 'parts.moe' are a OwnExperts"),
    "weight used elsewhere": Cell(
        used_elsewhere, refused="'parts.side.weight' is also a weight of the experts"
    ),
    "on one rank": Cell(forward=rarely, refused="Rank 0 of the group calls .* while rank 1 ends its forward"),
    "in another order": Cell(two, in_another_order, refused="'parts.a' while rank 1 calls .* 'parts.b'"),
    "zero=3": Cell(words="zero=3", refused="replicated data parallel training only"),
}


# -- running ---------------------------------------------------------------------------------------------------


def make(cell: Cell) -> nn.Module:
    torch.manual_seed(0)
    model = Model(cell.parts(), cell.forward)
    numbers = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in dict.fromkeys(model.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=numbers) * 0.4)
    model.train()
    cell.change(model)
    return model


def cast(cell: Cell, rows: Tensor) -> Tensor:
    return rows.double() if cell.tolerance < 1e-6 else rows


@dataclass
class Result:
    losses: list[float]
    weights: dict[str, Tensor]


def plainly(cell: Cell) -> Result:
    """In one process, with all rows."""
    model = make(cell)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = cell.optimizer(trained)
    losses = []
    precision = cell.settings.get("mixed_precision", "no")
    dtype = {
        "bf16": torch.bfloat16,
    }.get(precision, torch.bfloat16)
    for step in range(STEPS):
        for micro in range(cell.accumulation):
            rows = cast(cell, batch(10 * step + micro))
            with torch.autocast("cpu", dtype, enabled=precision != "no"):
                outputs = model(rows)
            loss = cell.loss(model, outputs.float() if precision != "no" else outputs, rows)
            (loss / cell.accumulation).backward()
            losses.append(loss.item())
        if cell.clip:
            nn.utils.clip_grad_norm_(trained, cell.clip)
        optimizer.step()
        optimizer.zero_grad()
    return Result(losses, {name: p.detach().clone() for name, p in model.named_parameters()})


def split(cell: Cell, verify: str = "off") -> Result | str:
    """On each of the ranks, with its rows; the losses are means over the ranks. Or what refuses it."""
    from lockstep import Accelerator, DistributedDataParallelKwargs, GradScalerKwargs

    torch.set_num_threads(1)
    FIRST[0] = int(os.environ["RANK"]) == 0
    try:
        accelerator = Accelerator(
            cpu=True,
            parallel=f"ep=2 {cell.words} verify={verify}",
            gradient_accumulation_steps=cell.accumulation,
            kwargs_handlers=[
                DistributedDataParallelKwargs(find_unused_parameters=True),
                GradScalerKwargs(init_scale=16.0),  # so that no step is left out
            ],
            **cell.settings,
        )
        result = _trained(cell, accelerator)
        accelerator.free_memory()
    except LockstepError as error:
        return f"{type(error).__name__}: {error}"
    return result


def _trained(cell: Cell, accelerator: Any) -> Result:
    user = make(cell)
    names = [name for name, _ in user.named_parameters()]
    trained = [p for p in user.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(user, cell.optimizer(trained))
    losses = []
    for step in range(STEPS):
        for micro in range(cell.accumulation):
            rows = cast(cell, batch(10 * step + micro))
            rows = rows.chunk(accelerator.num_processes)[accelerator.process_index]
            with accelerator.accumulate(model):
                loss = cell.loss(accelerator.unwrap_model(model), model(rows), rows)
                accelerator.backward(loss)
                if cell.clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), cell.clip)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    weights = accelerator.get_state_dict(model)
    return Result(losses, {name: weights[name].detach().clone() for name in names})
