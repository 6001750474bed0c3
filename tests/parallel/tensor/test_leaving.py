"""Terms of a loss that are computed from what leaves a split module: equal to plain torch, or refused on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Accelerator
from lockstep.errors import UsageError
from parallel.tensor import problem

WIDTH, HIDDEN = 8, 16
Taken = list[Tensor]
Hooked = Callable[["Net", Taken], object]
Term = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """``kept`` is what the forward keeps of the features in attributes."""

    def __init__(self, kept: Term | None) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, HIDDEN),
            nn.Linear(HIDDEN, WIDTH),
        )
        self.act = nn.GELU()
        self.kept, self.term = kept, None

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(self.norm(x)))
        if self.kept is not None:
            self.term = self.kept(h)
        return x + self.down(h)


class Net(nn.Module):
    def __init__(self, kept: Term | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(Block(kept) for _ in range(2))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def by_hook(find: Callable[[Block], nn.Module], term: Term) -> Hooked:
    def add(net: Net, taken: Taken) -> None:
        for layer in net.layers:
            find(layer).register_forward_hook(lambda m, a, out: taken.append(term(out)))

    return add


def by_pre_hook(find: Callable[[Block], nn.Module], term: Term) -> Hooked:
    def add(net: Net, taken: Taken) -> None:
        for layer in net.layers:
            find(layer).register_forward_pre_hook(lambda m, args: taken.append(term(args[0])))

    return add


def mean_square(h: Tensor) -> Tensor:
    return h.square().mean()


KEPT: dict[str, Term] = {
    "mean of absolutes": lambda h: h.abs().mean(),
    "distance from a code": lambda h: (h - h.detach().sign()).square().mean(),
    "small": lambda h: 1e-3 * h.abs().mean(),
    # Equal on all ranks, unlike its gradient.
    "over its value": lambda h: h.square().mean() / h.square().mean().detach(),
    "less its value": lambda h: h.square().mean() - h.square().mean().detach(),
    "sum of a softmax": lambda h: h.softmax(-1).sum(-1).mean(),
    "not yet large": lambda h: F.relu(h.square().mean() - 10),
}
OUT: dict[str, Hooked] = {
    "hook of the column layer": by_hook(lambda b: b.up, mean_square),
    "hook of the activation": by_hook(lambda b: b.act, lambda h: h.abs().mean()),
    "hook before the row layer": by_pre_hook(lambda b: b.down, mean_square),
    "hook that takes one feature": by_hook(lambda b: b.act, lambda h: h[..., 0].square().mean()),
    "hook with a margin": by_hook(lambda b: b.act, lambda h: F.relu(h - 0.1).mean()),
}
WHOLE: dict[str, Hooked] = {
    "hook of the block": by_hook(lambda b: b, mean_square),
    "hook of the norm": by_hook(lambda b: b.norm, lambda h: h.abs().mean()),
    "hook of the row layer": by_hook(lambda b: b.down, mean_square),
    "hook before the column layer": by_pre_hook(lambda b: b.up, mean_square),
}
LATER = "after some steps"
REFUSED = [*KEPT, *OUT, LATER]


def trained(
    name: str, prepare: Callable[[Net], Any], backward: Callable[[Tensor], None]
) -> dict[str, Tensor]:
    """Gradients of the loss with the term."""
    torch.manual_seed(0)
    net = Net(KEPT.get(name, mean_square if name == LATER else None))
    taken: Taken = []
    (OUT | WHOLE).get(name, lambda *_: None)(net, taken)
    model = prepare(net)
    x = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(1))
    for step in range(4 if name == LATER else 1):
        taken.clear()
        model.zero_grad()
        loss = model(x).square().mean()
        # The weight of the term grows.
        weight = 1.0 if name != LATER else max(step - 1, 0)
        if taken:
            loss = loss + torch.stack(taken).sum()
        elif weight and net.layers[0].term is not None:
            loss = loss + weight * sum(layer.term for layer in net.layers)
        backward(loss)
    return {key: problem.whole(p.grad) for key, p in net.named_parameters()}


@functools.cache
def expected(name: str) -> dict[str, Tensor]:
    return trained(name, lambda net: net, lambda loss: loss.backward())


def outcomes(names: list[str], parallel: str) -> dict[str, str]:
    torch.set_num_threads(1)
    found = {}
    for name in names:
        accelerator = Accelerator(cpu=True, parallel=parallel)
        try:
            apart = problem.difference(
                trained(name, accelerator.prepare, accelerator.backward), expected(name)
            )
            found[name] = "equal" if apart < 1e-4 else f"off by {apart:.2g}"
        except UsageError as error:
            found[name] = f"refused: {error}"
        finally:
            accelerator.free_memory()
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_loss_of_features_of_one_rank_is_refused_on_every_rank(run_distributed: Any, ranks: int) -> None:
    for found in run_distributed(outcomes, ranks, REFUSED, f"tp={ranks}", timeout_s=240):
        assert {name: said for name, said in found.items() if "part of a tensor" not in said} == {}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_loss_of_what_is_whole_has_plain_torchs_gradients(run_distributed: Any, ranks: int) -> None:
    for found in run_distributed(outcomes, ranks, list(WHOLE), f"tp={ranks}", timeout_s=240):
        assert set(found.values()) == {"equal"}, found


def test_a_loss_of_features_is_right_on_one_process() -> None:
    accelerator = Accelerator(cpu=True)
    found = trained("mean of absolutes", accelerator.prepare, accelerator.backward)
    assert problem.difference(found, expected("mean of absolutes")) == 0
    accelerator.free_memory()
