"""What the lessons share: starting processes, a small model with its data, and a table of what was measured.

A lesson has a function ``demo`` that runs on every process and returns a list of :class:`Check`.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

ROWS = 24
"""Rows of a batch. All processes together compute on this many, so the numbers do not depend on their number."""

sgd = partial(torch.optim.SGD, lr=0.1)
# With its usual eps of 1e-8, Adam hardly sees the scale of a gradient: a sum in place of a mean would go unnoticed.
adam = partial(torch.optim.Adam, lr=0.01, eps=0.01)


@dataclass(frozen=True)
class Check:
    """One line of a lesson's table: what was measured, and what theory says."""

    what: str
    measured: str
    expected: str
    holds: bool


def count(what: str, measured: int, formula: float) -> Check:
    """A number that a formula gives exactly."""
    return Check(what, f"{measured:,}", f"{formula:,.0f}", measured == formula)


def same(what: str, ours: Sequence[Tensor], theirs: Sequence[Tensor], within: float = 1e-6) -> Check:
    """Tensors that should be equal. Floating-point sums in another order differ by rounding, hence ``within``."""
    # view_as refuses another shape. torch's max, not Python's, gives NaN if there is one.
    offs = [(a.double() - b.double().view_as(a)).abs().max() for a, b in zip(ours, theirs, strict=True)]
    off = torch.stack(offs).max().item()
    holds = off <= within
    wanted = f"within {within:g}" if within else "equal"
    return Check(what, wanted if holds else f"off by {off:.2g}", wanted, holds)


def small_model() -> nn.Sequential:
    """The model of most lessons. The seed makes it the same on every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs [ROWS, 8] and targets [ROWS, 4] of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, 4, generator=generator)


def share(tensor: Tensor, index: int, shares: int) -> Tensor:
    """The rows of one of several processes."""
    return tensor.chunk(shares)[index]


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def train_alone(steps: int, build: Callable[..., torch.optim.Optimizer] = sgd) -> list[Tensor]:
    """What the lessons are compared with: the parameters that plain PyTorch has after training in one process."""
    model = small_model()
    optimizer = build(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        mean_loss(model, *batch(step)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@dataclass
class Wire:
    """The bytes and messages that this process has sent."""

    bytes: int = 0
    messages: int = 0


@contextmanager
def wire() -> Iterator[Wire]:
    """Counts what torch.distributed is given to send inside of the block.

    A message to one process counts with its size. An all-reduce of B bytes over N processes counts as
    2 (N - 1) / N B, which is what each process sends in it: ring_all_reduce.py shows why.
    """
    counted, originals = Wire(), {name: getattr(dist, name) for name in ("send", "isend", "all_reduce")}

    def counting(name: str) -> Callable[..., object]:
        def call(tensor: Tensor, *args: object, **kwargs: object) -> object:
            n = dist.get_world_size()
            counted.bytes += 2 * (n - 1) * tensor.nbytes // n if name == "all_reduce" else tensor.nbytes
            counted.messages += 1
            return originals[name](tensor, *args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield counted
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def run(demo: Callable[[], list[Check]], processes: int) -> None:
    """Run the lesson on that many processes and print its table; exit with 1 if a line does not hold."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
    mp.spawn(_one_process, args=(demo, processes), nprocs=processes)


def _one_process(rank: int, demo: Callable[[], list[Check]], processes: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    checks = demo()
    wrong = [check for check in checks if not check.holds]
    if rank == 0:
        print(table(checks))
    elif wrong:
        print(f"wrong on process {rank}:\n{table(wrong)}")
    dist.barrier()
    dist.destroy_process_group()
    if wrong:
        sys.exit(1)


def table(checks: Sequence[Check]) -> str:
    lines = [f"{'':<52}{'measured':>16}{'expected':>16}"]
    lines += [f"{check.what:<52}{check.measured:>16}{check.expected:>16}" for check in checks]
    return "\n".join(lines)
