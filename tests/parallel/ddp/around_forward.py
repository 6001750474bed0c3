"""Loops whose losses come from the module inside of a prepared model, or from its parts; also for plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep import Accelerator, DistributedDataParallelKwargs
from lockstep.errors import UsageError
from parallel.zero_scenarios import Plain, clip_and_step, learn, step_and_clear

STEPS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head, self.other = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.features(x)
        return self.head(features) + self.other(features)


def rows(run: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    return x.chunk(run.num_processes)[run.process_index], y.chunk(run.num_processes)[run.process_index]


def inner(model: Any) -> Any:
    return getattr(model, "module", model)


def head_alone(model: Any, x: torch.Tensor) -> torch.Tensor:
    net = inner(model)
    features = net.features(x)
    return net.head(features) + net.other(features)


def evaluate(model: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def asks(x: torch.Tensor) -> torch.Tensor:
    return x.requires_grad_()


Loss = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
LOSSES: dict[str, Loss] = {
    "forward by its name": lambda model, x, y: F.mse_loss(model.forward(x), y),
    "module": lambda model, x, y: F.mse_loss(inner(model)(x), y),
    "parts": lambda model, x, y: F.mse_loss(head_alone(model, x), y),
    "both": lambda model, x, y: F.mse_loss(model(x), y) + F.mse_loss(head_alone(model, x), y),
    "features and a penalty": lambda model, x, y: (
        F.mse_loss(model(x), y) + inner(model).features(x).square().mean()
    ),
    "two inputs": lambda model, x, y: (
        F.mse_loss(inner(model)(x), y) + (inner(model)(x) - inner(model)(x.flip(1))).square().mean()
    ),
    "a checkpointed part": lambda model, x, y: F.mse_loss(
        inner(model).head(checkpoint(inner(model).features, x, use_reentrant=False))
        + inner(model).other(inner(model).features(x)),
        y,
    ),
    "a reentrant part": lambda model, x, y: F.mse_loss(
        inner(model).head(features := checkpoint(inner(model).features, asks(x), use_reentrant=True))
        + inner(model).other(features),
        y,
    ),
    "the model, reentrant": lambda model, x, y: F.mse_loss(checkpoint(model, asks(x), use_reentrant=True), y),
    "a penalty of gradients by inputs": lambda model, x, y: (
        F.mse_loss(out := inner(model)(asks(x)), y)
        + torch.autograd.grad(out.sum(), x, create_graph=True)[0].square().mean()
    ),
    "a penalty of weights": lambda model, x, y: (
        F.mse_loss(inner(model)(x), y) + sum(p.square().sum() for p in model.parameters())
    ),
}


def train(run: Any, loop: str) -> dict[str, torch.Tensor]:
    """The weights after a loop."""
    torch.manual_seed(5)
    plain = Net()
    model, optimizer = run.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    kind, _, name = loop.partition(": ")
    loss_of = LOSSES.get(name, LOSSES["module"])
    for step in range(STEPS):
        x, y = rows(run, step)
        if kind == "evaluation first" and step == 0:
            evaluate(model, x)
        if kind == "in turn" and step % 2:
            learn(run, optimizer, F.mse_loss(model(x), y))
        elif kind == "two backwards":
            run.backward(loss_of(model, x, y))
            learn(run, optimizer, LOSSES["parts"](model, x, y))
        elif kind == "a forward without a backward":
            model(x)
            learn(run, optimizer, loss_of(model, x, y))
        elif kind == "window":
            for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
                with run.accumulate(model):
                    run.backward(loss_of(model, part_x, part_y))
                    if run.sync_gradients:
                        step_and_clear(optimizer)
        elif kind == "no_sync":
            with run.no_sync(model):
                run.backward(loss_of(model, x, y))
            learn(run, optimizer, loss_of(model, x.flip(0), y.flip(0)))
        elif kind == "clipped":
            run.backward(loss_of(model, x, y))
            clip_and_step(run, model, optimizer)
        elif kind == "put back":
            if run.process_index == 0 and step == 1:
                # As a state_dict() of a model does that leaves out a submodule.
                head = plain.head
                del plain.head
                plain.head = head
            learn(run, optimizer, loss_of(model, x, y))
        elif kind == "unused part":
            features = inner(model).features(x)
            learn(run, optimizer, F.mse_loss((plain.head if step % 2 else plain.other)(features), y))
        else:
            learn(run, optimizer, loss_of(model, x, y))
    return {name: value.detach().clone() for name, value in whole(run, model).items()}


def whole(run: Any, model: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = (
        run.get_state_dict(model) if hasattr(run, "get_state_dict") else model.state_dict()
    )
    return state


PLAIN_LOOPS = [f"each step: {name}" for name in LOSSES]
LOOPS = [
    *PLAIN_LOOPS,
    *(f"evaluation first: {name}" for name in ("forward by its name", "module", "parts")),
    *("in turn: module", "two backwards: module"),
    *("a forward without a backward: module", "window: module", "window: parts", "no_sync: module"),
    *("clipped: parts", "put back: module", "put back: forward by its name"),
    *("unused part: ", "put back: both"),
]
ON_SHARDS = [
    "each step: forward by its name",
    "evaluation first: forward by its name",
    "clipped: forward by its name",
]


def on_ranks(loops: list[str], parallel: str) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for loop in loops:
        options = DistributedDataParallelKwargs(find_unused_parameters=loop.startswith("unused part"))
        accelerator = Accelerator(
            cpu=True,
            parallel=parallel,
            kwargs_handlers=[options],
            gradient_accumulation_steps=2 if loop.startswith("window") else 1,
        )
        found[loop] = train(accelerator, loop)
    return found


def on_one(loops: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    return {loop: train(Plain(2 if loop.startswith("window") else 1), loop) for loop in loops}


def beside(run: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    run.backward(F.mse_loss(model(x), y))
    inner(model).features(x).square().mean().backward()


def by_autograd_grad(run: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    run.backward(F.mse_loss(model(x), y))
    parameters = list(model.parameters())
    found = torch.autograd.grad(F.l1_loss(inner(model)(x), y), parameters)
    for p, gradient in zip(parameters, found, strict=True):
        p.grad += gradient


def reentrant(run: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    run.backward(F.mse_loss(checkpoint(inner(model), asks(x), use_reentrant=True), y))


def in_no_sync(run: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    with run.no_sync(model):
        run.backward(F.mse_loss(inner(model)(x), y))


def scaled_by_own_rows(run: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    run.backward(F.mse_loss(model(x), y))
    for p in model.parameters():
        p.grad *= x.norm()


OWN = {
    beside: "is not equal on all ranks",
    by_autograd_grad: "is not equal on all ranks",
    reentrant: "is not equal on all ranks",
    in_no_sync: "from this rank only, because each backward since the last step ran inside no_sync",
    scaled_by_own_rows: "is not equal on all ranks",
}
"""Ways to gradients that are this rank's own."""


def refusals() -> dict[str, str]:
    """What the first step says to each."""
    found = {}
    for way in OWN:
        accelerator = Accelerator(cpu=True)
        plain = Net()
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        before = [p.detach().clone() for p in plain.parameters()]
        way(accelerator, model, *rows(accelerator, 0))
        try:
            optimizer.step()
        except UsageError as error:
            found[way.__name__] = str(error)
        assert all(torch.equal(a, b) for a, b in zip(before, plain.parameters(), strict=True))
        accelerator.free_memory()
    return found
