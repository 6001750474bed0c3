"""Pipeline parallel: each process has some of the layers, and micro-batches pass from one to the next.

    python examples/from_scratch/pipeline.py

Three orders of the same work: GPipe runs all forwards, then all backwards. 1F1B runs a backward as soon as it can.
Zero bubble splits backward in two, and fills idle time with the half that nobody waits for.

Papers: Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream, SOSP 2019 (1F1B);
Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (its ZB-H1).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline_schedules import Action, Schedule, gpipe, idle_time, one_f_one_b, zero_bubble
from world import Check, batch, count, run, same, wire

MICRO_BATCHES = 8


class Stage:
    """One process's layers.

    ``kept`` has, for each micro-batch on the way, what backward will need.
    """

    def __init__(self, layers: nn.Sequential, inputs: Tensor, targets: Tensor) -> None:
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.layers, self.parameters = layers, list(layers.parameters())
        self.inputs, self.targets = inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.gradients: dict[int, Tensor | None] = {}
        self.most_kept = 0
        self.sending: list[dist.Work] = []

    def run(self, actions: list[Action]) -> None:
        for kind, m in actions:
            if kind == "F":
                self.forward(m)
            if kind in "BI":
                self.for_inputs(m)
            if kind in "BW":
                self.for_weights(m)
            self.most_kept = max(self.most_kept, len(self.kept))
        for work in self.sending:
            work.wait()

    def forward(self, m: int) -> None:
        inputs = self.inputs[m] if self.rank == 0 else self.receive(self.rank - 1, self.inputs[m])
        outputs = self.layers(inputs.requires_grad_(self.rank > 0))
        if self.rank == self.last:
            outputs = F.mse_loss(outputs, self.targets[m]) / MICRO_BATCHES
        else:
            self.sending.append(dist.isend(outputs.detach(), self.rank + 1))
        self.kept[m] = (inputs, outputs)

    def for_inputs(self, m: int) -> None:
        """The gradient that the stage before waits for."""
        inputs, outputs = self.kept[m]
        self.gradients[m] = None if self.rank == self.last else self.receive(self.rank + 1, outputs)
        if self.rank > 0:
            (gradient,) = torch.autograd.grad(outputs, inputs, self.gradients[m], retain_graph=True)
            self.sending.append(dist.isend(gradient, self.rank - 1))

    def for_weights(self, m: int) -> None:
        """The gradients that only this stage's optimizer waits for."""
        _, outputs = self.kept.pop(m)
        new = torch.autograd.grad(outputs, self.parameters, self.gradients.pop(m))
        for parameter, gradient in zip(self.parameters, new, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def receive(self, rank: int, like: Tensor) -> Tensor:
        received = torch.empty_like(like)
        dist.recv(received, rank)
        return received


def deep_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)))


def run_schedule(schedule: Schedule) -> Stage:
    """One forward and backward of a batch.

    Afterwards this process's layers have their gradients.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs, _ = batch(0)
    stage = Stage(deep_model()[rank * 8 // size : (rank + 1) * 8 // size], inputs, inputs.roll(1, dims=1))
    stage.run(schedule(rank, size, MICRO_BATCHES))
    return stage


def demo() -> list[Check]:
    plain, (inputs, _) = deep_model(), batch(0)
    F.mse_loss(plain(inputs), inputs.roll(1, dims=1)).backward()
    rank, n = dist.get_rank(), dist.get_world_size()
    theirs = [parameter.grad for parameter in plain[rank * 8 // n : (rank + 1) * 8 // n].parameters()]
    neighbours = (rank > 0) + (rank < n - 1)
    checks = []
    for name, schedule, kept, idle in (
        ("GPipe", gpipe, MICRO_BATCHES, 3 * (n - 1)),
        ("1F1B", one_f_one_b, n - rank, 3 * (n - 1)),
        ("zero bubble", zero_bubble, n, n - 1),
    ):
        with wire() as sent:
            stage = run_schedule(schedule)
        ours = [parameter.grad for parameter in stage.parameters]
        checks += [
            same(f"{name}: gradients, beside one process", ours, theirs),
            count(f"{name}: micro-batches kept at once", stage.most_kept, kept),
            count(f"{name}: units of time idle", idle_time(schedule, n, MICRO_BATCHES), idle),
            count(f"{name}: bytes sent", sent.bytes, neighbours * inputs.nbytes),
        ]
    return checks


if __name__ == "__main__":
    run(demo, processes=4)
