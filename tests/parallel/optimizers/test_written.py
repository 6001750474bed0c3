"""Optimizers that people write x {ddp, zero=1, zero=2, zero=3}: plain torch's numbers in one process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Optimizer, Rprop

from lockstep import Accelerator
from parallel.optimizers import written as w
from parallel.plain import difference
from parallel.zero.test_parity import full
from tests.frozen.verdicts import hold

STEPS = 5
TOLERANCE = 1e-5
"""Of the parameters, relative, each tensor by its norm."""


class Net(nn.Module):
    """Matrices, vectors, an embedding, odd sizes, and a scalar, which is never sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)))
        self.head = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens))) * self.scale


def make_model() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


def make_batch(step: int, part: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 11, (8,), generator=generator)
    rank, ranks = part
    return tokens.chunk(ranks)[rank], (tokens % 5).chunk(ranks)[rank]


@dataclass
class Cell:
    """How an optimizer is built, and how a loop calls it.

    ``loop``: "plain", "closure", or "two" (first_step and second_step). ``after``: it is built from the prepared model.
    ``double``: in float64. Its update is ill-conditioned: plain torch moves by 1e-4 to 2e-3 where first weights are
    off by one rounding step of fp32, so that in fp32 no two processors agree.
    """

    build: Callable[..., Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    loop: str = "plain"
    double: bool = False
    after: bool = False
    scheduler: bool = False


def lookahead(params: Any, base: Any = SGD, **options: Any) -> Optimizer:
    return w.Lookahead(base(params, **options))


def bare(params: Any) -> Optimizer:
    return w.BareWrapper(w.LARS(params))


def hooked(params: Any) -> Optimizer:
    """Plain SGD, whose gradients a hook of its step divides by their norms."""
    optimizer = SGD(params, lr=0.1)

    def normalise(optimizer: Optimizer, *_: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.div_(p.grad.norm().item() + 0.1)

    optimizer.register_step_pre_hook(normalise)
    return optimizer


def replaced(params: Any) -> Optimizer:
    """An object whose own step takes the place of its class's."""
    optimizer = SGD(params, lr=0.1)

    def step(closure: Any = None) -> None:
        with torch.no_grad():
            for p in optimizer.param_groups[0]["params"]:
                p.sub_(p.grad / p.grad.norm().clamp_min(0.1), alpha=0.1)

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


CELLS: dict[str, Cell] = {
    "lars": Cell(w.LARS),
    "lars scheduled": Cell(w.LARS, scheduler=True),
    "sam": Cell(w.SAM, {"lr": 0.1, "momentum": 0.9}, "two"),
    "sam closure": Cell(w.SAM, {"lr": 0.1}, "backward, closure"),
    "sam built after": Cell(w.SAM, {"lr": 0.1, "momentum": 0.9}, "two", after=True),
    "lion": Cell(w.Lion),
    "lion on shards": Cell(w.ElementwiseLion, scheduler=True),
    "adafactor of torch": Cell(Adafactor, {"lr": 0.05}),
    "rprop": Cell(Rprop, {"lr": 0.01}),
    "shampoo": Cell(w.Shampoo),
    "centralised columns": Cell(w.CentralisedColumns),
    "noise": Cell(w.NoisySGD, {"lr": 0.1}),
    "lookahead": Cell(lookahead, {"lr": 0.1, "momentum": 0.9}),
    "lookahead of lars": Cell(lookahead, {"base": w.LARS}),
    "clipping": Cell(w.ClippingSGD, {"lr": 0.5}),
    "masters": Cell(w.Masters),
    "masters built after": Cell(w.Masters, after=True),
    "holds data": Cell(w.HoldsData),
    "state by shape": Cell(w.StateByShape),
    "lists": Cell(w.KeepsLists),
    "one vector": Cell(w.OneVector),
    "own gradient": Cell(w.OwnGradient),
    "schedule free": Cell(w.ScheduleFree, loop="modes"),
    "normed adam": Cell(w.NormedAdam, {"lr": 0.01, "eps": 1e-2}),
    "renamed": Cell(w.Renamed),
    "lbfgs": Cell(LBFGS, {"lr": 0.5, "max_iter": 4, "history_size": 3}, "closure", double=True),
    "sgd closure": Cell(SGD, {"lr": 0.1, "momentum": 0.9}, "closure"),
    "hook of the step": Cell(hooked),
    "bare wrapper": Cell(bare),
    "by parameter": Cell(w.ByParameter),
    "numpy": Cell(w.NumPySGD),
    "own step": Cell(replaced),
}


def train(
    model: Any,
    optimizer: Any,
    scheduler: Any,
    loop: str,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    part: tuple[int, int] = (0, 1),
) -> None:
    for step in range(STEPS):
        tokens, labels = make_batch(step, part)

        def compute(tokens: torch.Tensor = tokens, labels: torch.Tensor = labels) -> torch.Tensor:
            loss = F.cross_entropy(model(tokens), labels)
            backward(loss)
            return loss

        def closure(compute: Callable[[], torch.Tensor] = compute) -> torch.Tensor:
            optimizer.zero_grad()
            loss = compute()
            if part[1] == 1:
                return loss
            mean = loss.detach().clone()  # as a line search needs it
            torch.distributed.all_reduce(mean)
            return mean / part[1]

        if loop == "backward, closure":
            optimizer.zero_grad()
            compute()
        if loop.endswith("closure"):
            optimizer.step(closure)
        else:
            optimizer.zero_grad()
            compute()
            if loop == "two":
                optimizer.first_step(zero_grad=True)
                compute()
                optimizer.second_step(zero_grad=True)
            else:
                optimizer.step()
        if loop == "modes" and step % 2:
            optimizer.eval()
            optimizer.train()
        if scheduler is not None:
            scheduler.step()


@contextmanager
def numbers_of(cell: Cell) -> Iterator[None]:
    """New tensors have the type of the cell inside."""
    torch.set_default_dtype(torch.float64 if cell.double else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def expected(cell: Cell) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = make_model()
    optimizer = cell.build(model.parameters(), **cell.options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) if cell.scheduler else None
    train(model, optimizer, scheduler, cell.loop)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def spread(cells: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """Parameters after training, or what was raised, by (parallel, name)."""
    torch.set_num_threads(1)
    results: dict[tuple[str, str], Any] = {}
    for parallel, name in cells:
        accelerator = Accelerator(
            cpu=True, parallel=parallel, step_scheduler_with_optimizer=not CELLS[name].scheduler
        )
        try:
            with numbers_of(CELLS[name]):
                results[parallel, name] = trained(accelerator, CELLS[name], parallel == "ddp")
        except Exception:
            results[parallel, name] = traceback.format_exc()
        accelerator.free_memory()
    return results


def trained(accelerator: Accelerator, cell: Cell, seeds_alike: bool) -> dict[str, torch.Tensor]:
    rank, ranks = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(3 if rank == 0 or seeds_alike else 33)
    model: Any = make_model()
    if cell.after:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(cell.build(model.parameters(), **cell.options))
        scheduler = None
    else:
        optimizer = cell.build(model.parameters(), **cell.options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) if cell.scheduler else None
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    train(model, optimizer, scheduler, cell.loop, accelerator.backward, (rank, ranks))
    return {n.removeprefix("module."): full(p) for n, p in model.named_parameters()}


HELD = "is a tensor in the memory of the parameter"
OF_SHARD = "uses a sharded parameter that is not in its param_groups"
DRAWS = "draws random numbers in its step, and the ranks' generators differ"
REFUSED_ON_SHARDS = {
    "holds data": HELD,
    "masters built after": OF_SHARD,
    "noise": DRAWS,
}

STRATEGIES = ["ddp", "zero=1", "zero=2", "zero=3"]


def verdict_of(last: str) -> tuple[str, str]:
    """By the last line of a traceback, a difference, or nothing."""
    return "refused" if last.startswith("lockstep.errors.") else "differs" if last else "equal", last


@pytest.mark.parametrize(
    "strategies",
    [
        pytest.param(None, id="each under one strategy"),
        *(pytest.param([name], id=name, marks=pytest.mark.exhaustive) for name in STRATEGIES),
    ],
)
def test_optimizers_that_people_write_give_the_numbers_of_one_process(
    run_distributed, strategies: list[str] | None
) -> None:
    torch.set_num_threads(1)
    cells = (
        [(STRATEGIES[-1 - number % 4], name) for number, name in enumerate(CELLS)]
        if strategies is None
        else [(parallel, name) for parallel in strategies for name in CELLS]
    )
    results = run_distributed(spread, 2, cells, timeout_s=300)
    wrong, refused = {}, {}
    for parallel, name in cells:
        with numbers_of(CELLS[name]):
            oracle = expected(CELLS[name])
        for rank, result in enumerate(results):
            found = result[parallel, name]
            words = REFUSED_ON_SHARDS.get(name, "") if parallel != "ddp" else ""
            if words and isinstance(found, str) and words in found:
                refused[parallel, name, rank] = found
            elif isinstance(found, str) or not (found := difference(found, oracle)) <= TOLERANCE:
                wrong[parallel, name, rank] = found
        last = [
            str((wrong | refused).get((parallel, name, rank), "")).strip().splitlines()[-1:]
            for rank in range(2)
        ]
        hold(f"optimizers, {parallel}", [{name: verdict_of("".join(lines))} for lines in last])
    assert not wrong, "\n".join(f"{key}: {value}" for key, value in wrong.items())


RESUMED = ["lars", "adafactor of torch", "lbfgs"]


def resumed(directory: str) -> dict[str, Any]:
    """Trained, saved, loaded by another sharded in another way, and trained on; beside the same without a stop."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in RESUMED:
        cell, found = CELLS[name], []
        for parallels in (["zero=3"], ["zero=3", "zero=1"]):
            place = f"{directory}/{name}"
            for number, parallel in enumerate(parallels):
                accelerator = Accelerator(cpu=True, parallel=parallel)
                part = (accelerator.process_index, accelerator.num_processes)
                model: Any = make_model()
                model, optimizer = accelerator.prepare(model, cell.build(model.parameters(), **cell.options))
                if number == 0:
                    train(model, optimizer, None, cell.loop, accelerator.backward, part)
                if len(parallels) == 2 and number == 0:
                    accelerator.save_state(place)
                elif number == 1:
                    accelerator.load_state(place)
                if number == len(parallels) - 1:
                    train(model, optimizer, None, cell.loop, accelerator.backward, part)
                    found.append({n: full(p) for n, p in model.named_parameters()})
                accelerator.free_memory()
        results[name] = difference(found[1], found[0])
    return results


def test_their_state_goes_on_from_a_checkpoint(run_distributed, tmp_path) -> None:
    for result in run_distributed(resumed, 2, str(tmp_path), timeout_s=240):
        assert all(value < 1e-6 for value in result.values()), result
