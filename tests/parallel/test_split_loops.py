"""Loops with other ways through a split model than one forward and one backward: right, or refused on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from lockstep import Accelerator
from lockstep.errors import UsageError
from parallel.plain import full as whole
from tests.frozen.verdicts import hold

WIDTH, CLASSES = 8, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        self.aux = h.square().mean()
        return x + self.down(h)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class ArcFace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        cosines = F.linear(F.normalize(embeddings), F.normalize(self.weight))
        moved = torch.cos(torch.acos(cosines.clamp(-0.99, 0.99)) + 0.2)
        return F.cross_entropy(8 * torch.where(F.one_hot(labels, CLASSES).bool(), moved, cosines), labels)


class Uncertainty(nn.Module):
    """Weights of two losses, which are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(2))

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        losses = torch.stack([output.square().mean(), F.cross_entropy(output, labels)])
        return (torch.exp(-self.log) * losses + self.log).sum()


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.model(x), labels)


def batch() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=numbers), torch.randint(0, CLASSES, (8,), generator=numbers)


@dataclass
class Run:
    prepare: Callable[[nn.Module], Any]
    backward: Callable[..., None]

    def model(self) -> Any:
        torch.manual_seed(0)
        return self.prepare(Net())


def x() -> Tensor:
    return batch()[0]


# -- each returns a number of plain torch ----------------------------------------------------------------


def two_backwards(run: Run) -> float:
    model = run.model()
    output = model(x())
    run.backward(output.mean(), retain_graph=True)
    run.backward(output.square().mean())
    return norm(model)


def two_forwards(run: Run) -> float:
    model = run.model()
    run.backward(model(x()).mean())
    run.backward(model(x()).square().mean())
    return norm(model)


def chained(run: Run) -> float:
    first, second = run.model(), run.model()
    run.backward(second(first(x())).square().mean())
    return norm(first)


def gradient_of_inputs(run: Run) -> float:
    inputs = x().requires_grad_()
    run.backward(run.model()(inputs).square().mean())
    assert inputs.grad is not None
    return inputs.grad.norm().item()


def gradient_penalty(run: Run) -> float:
    model, inputs = run.model(), x().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
    run.backward((gradient.norm(dim=1) - 1).square().mean())
    return norm(model)


def graph_of_gradients(run: Run) -> float:
    model = run.model()
    run.backward(model(x()).square().mean(), create_graph=True)
    return norm(model)


def auxiliary_losses(run: Run) -> float:
    model = run.model()
    loss = model(x()).square().mean()
    run.backward(loss + sum(layer.aux for layer in model.layers))
    return norm(model)


def jvp(run: Run) -> float:
    return torch.func.jvp(run.model(), (x(),), (torch.ones_like(x()),))[1].norm().item()


def forward_mode(run: Run) -> float:
    with forward_ad.dual_level():
        output = run.model()(forward_ad.make_dual(x(), torch.ones_like(x())))
        return forward_ad.unpack_dual(output).tangent.norm().item()


def vmap(run: Run) -> float:
    return torch.func.vmap(run.model())(x()[:, None]).norm().item()


def jacobian(run: Run) -> float:
    return torch.func.jacrev(run.model())(x()).norm().item()


def with_loss(kind: type[nn.Module]) -> Callable[[Run], float]:
    def loop(run: Run) -> float:
        torch.manual_seed(0)
        model = run.prepare(WithLoss(Net(), kind()))
        run.backward(model(*batch()))
        return norm(model)

    return loop


def norm(model: nn.Module) -> float:
    """Of the gradients that are here."""
    gradients = [p.grad for p in model.parameters() if not p.is_meta and p.grad is not None]
    return sum(whole(g).square().sum().item() for g in gradients) ** 0.5


EQUAL = "equal"
SPLIT = "cannot see what the ranks of a split model send each other"
LOOPS: dict[str, tuple[Callable[[Run], float], str, str]] = {
    "two backwards": (two_backwards, "a second time", EQUAL),
    "two forwards": (two_forwards, EQUAL, EQUAL),
    "chained": (chained, "requires a gradient", EQUAL),
    "gradient of inputs": (gradient_of_inputs, "requires a gradient", EQUAL),
    "gradient penalty": (gradient_penalty, "requires a gradient", "goes twice through layers"),
    "a graph of gradients": (graph_of_gradients, "gradient of a gradient", EQUAL),
    "auxiliary losses": (
        auxiliary_losses,
        "on another rank of the pipeline",
        "computed from a part of a tensor",
    ),
    "jvp": (jvp, SPLIT, SPLIT),
    "forward mode": (forward_mode, SPLIT, SPLIT),
    "vmap": (vmap, SPLIT, SPLIT),
    "jacobian": (jacobian, SPLIT, SPLIT),
    "ArcFace": (with_loss(ArcFace), EQUAL, EQUAL),
    "uncertainty": (with_loss(Uncertainty), EQUAL, EQUAL),
}
"""Name -> (loop, what is said of it under pp, and under tp)."""


def outcomes(parallel: str) -> dict[str, tuple[str, str]]:
    """Loop -> (equal, refused, differs or crashed; what was said)."""
    torch.set_num_threads(1)
    found = {}
    for name, (loop, _, _) in LOOPS.items():
        expected = loop(Run(lambda model: model, lambda loss, **options: loss.backward(**options)))
        accelerator = Accelerator(cpu=True, parallel=parallel)
        try:
            got = torch.tensor(loop(Run(accelerator.prepare, accelerator.backward))) ** 2
            if parallel.startswith("pp"):
                # Each rank has the gradients of its stage.
                torch.distributed.all_reduce(got)
            is_equal = abs(got.sqrt().item() - expected) < 1e-4 * expected
            found[name] = (EQUAL, EQUAL) if is_equal else ("differs", f"{got} for {expected}")
        except UsageError as error:
            found[name] = ("refused", str(error))
        except Exception as error:
            found[name] = ("crashed", f"{type(error).__name__}: {error}")
        finally:
            accelerator.free_memory()
    return found


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("parallel", ["pp=2", "tp=2"])
def test_a_loop_has_plain_torchs_gradients_or_is_refused_on_every_rank(
    run_distributed: Any, parallel: str
) -> None:
    ranks = run_distributed(outcomes, 2, parallel, timeout_s=240)
    hold(f"split loops, {parallel}", ranks)
    for found in ranks:
        said = {name: tp if parallel == "tp=2" else pp for name, (_, pp, tp) in LOOPS.items()}
        assert {name: text for name, (_, text) in found.items() if said[name] not in text} == {}


def apart(parallel: str) -> list[str]:
    said = []
    for kind in (ArcFace, Uncertainty):
        accelerator = Accelerator(cpu=True, parallel=parallel)
        try:
            accelerator.prepare(copy.deepcopy(kind()))
        except UsageError as error:
            said.append(str(error))
        accelerator.free_memory()
    return said


@pytest.mark.parametrize("parallel", ["pp=2", "tp=2"])
def test_a_loss_with_parameters_is_told_where_it_belongs(run_distributed: Any, parallel: str) -> None:
    for said in run_distributed(apart, 2, parallel):
        assert ["prepare one module that calls the model" in text for text in said] == [True, True]
