"""A small model, batches that differ from rank to rank and step to step, and what ranks report of a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Accelerator, BoundedStaleness
from train import problems

LEARNING_RATE, MOMENTUM, ROWS = 0.1, 0.8, 5
PATIENCE_S = 30.0
Tensors = dict[str, torch.Tensor]


def make_model() -> nn.Module:
    """With running statistics, and a counter that has no mean."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(problems.FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, problems.CLASSES)
        )


def make_plain_model() -> nn.Module:
    """Without buffers: its gradient depends on the parameters and the batch alone."""
    return problems.make_model()


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def loss_of(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    rows, labels = problems.make_rows(rank, number, ROWS)
    return F.cross_entropy(model(rows), labels)


def tensors(model: nn.Module) -> Tensors:
    """Parameters and buffers, copied, without the prefixes of wrappers."""
    return {name.removeprefix("module."): value.clone() for name, value in model.state_dict().items()}


def distance(actual: Tensors, expected: Tensors) -> float:
    """The largest difference of any element."""
    assert actual.keys() == expected.keys()
    return max((actual[name].double() - expected[name].double()).abs().max().item() for name in expected)


def are_equal(states: list[Tensors]) -> bool:
    return all(torch.equal(state[name], states[0][name]) for state in states for name in states[0])


def prepared(
    model: nn.Module, make_optimizer: Any = make_sgd
) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True)
    return accelerator, *accelerator.prepare(model, make_optimizer(model))


def learn(accelerator: Accelerator, model: nn.Module, optimizer: Any, block: Any, number: int) -> None:
    """One step of a rank, inside of a block."""
    accelerator.backward(loss_of(model, accelerator.process_index, number))
    if not isinstance(block, BoundedStaleness):
        optimizer.step()
    block.step()
    optimizer.zero_grad()


def wait_for(path: Path) -> None:
    """Until another rank has made this file."""
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.005)


def message_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Worker:
    """One rank of a hand-written simulation: plain torch, nothing of ours."""

    def __init__(self, rank: int, make_optimizer: Any = make_sgd) -> None:
        self.rank, self.model = rank, make_model()
        self.optimizer = make_optimizer(self.model)

    def step(self, numbers: list[int]) -> None:
        """One optimizer step with the mean gradient of these micro-batches."""
        self.optimizer.zero_grad()
        for number in numbers:
            (loss_of(self.model, self.rank, number) / len(numbers)).backward()
        self.optimizer.step()


@torch.no_grad()
def mean_of(workers: list[Worker]) -> Tensors:
    """The mean over the workers of everything that has one."""
    states = [worker.model.state_dict() for worker in workers]
    return {
        name: torch.stack([state[name] for state in states]).mean(0)
        for name, value in states[0].items()
        if value.is_floating_point()
    }


def put(workers: list[Worker], values: Tensors) -> None:
    for worker in workers:
        worker.model.load_state_dict(values, strict=False)
