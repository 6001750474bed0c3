"""Asynchronous data parallel training: nobody waits for this step's gradients, and the servers take turns.

    python examples/from_scratch/rotating_server.py

The gradients of step t go to the process t mod N, which adds them up and sends the sum to all. Meanwhile everyone
goes on. The sum is applied DELAY steps later, so a gradient is computed on weights that lack the last DELAY updates.

Papers: Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013;
Lian et al., Asynchronous Parallel Stochastic Gradient for Nonconvex Optimization, NIPS 2015.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from world import Check, batch, count, mean_loss, run, same, share, small_model, wire


class Round:
    """The exchange of one step's gradients.

    It begins with the step and may end much later.
    """

    def __init__(self, step: int, gradient: Tensor) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.server = step % self.size
        self.others = [rank for rank in range(self.size) if rank != self.server]
        self.gradient = gradient
        # The step is the message's tag: rounds overlap, and their messages must not be
        # mixed up.
        self.tag = step
        if self.rank == self.server:
            self.received = [torch.empty_like(gradient) for _ in self.others]
            pairs = zip(self.received, self.others, strict=True)
            self.running = [dist.irecv(buffer, rank, tag=self.tag) for buffer, rank in pairs]
        else:
            self.running = [dist.isend(gradient, self.server, tag=self.tag)]

    def answer(self) -> None:
        """The server's second half: add up what came, send the sum to all.

        The others have nothing to do.
        """
        if self.rank != self.server:
            return
        for work in self.running:
            work.wait()
        self.total = torch.stack([self.gradient, *self.received]).sum(0)
        self.running = [dist.isend(self.total, rank, tag=self.tag) for rank in self.others]

    def mean(self) -> Tensor:
        """The mean of all gradients of the step, on every process."""
        if self.rank != self.server:
            self.total = torch.empty_like(self.gradient)
            self.running.append(dist.irecv(self.total, self.server, tag=self.tag))
        for work in self.running:
            work.wait()
        return self.total / self.size


def train(steps: int = 8, delay: int = 2, lr: float = 0.1) -> list[Tensor]:
    """The trained parameters, the same on every process.

    With ``delay`` 0 it is synchronous training.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    model = small_model()
    waiting: list[Round] = []
    for step in range(steps):
        inputs, targets = batch(step)
        model.zero_grad()
        mean_loss(model, share(inputs, rank, size), share(targets, rank, size)).backward()
        gradient = parameters_to_vector(parameter.grad for parameter in model.parameters())
        waiting.append(Round(step, gradient))
        # The bound: no more than `delay` updates may be missing when the next gradient
        # is computed.
        if len(waiting) > delay:
            apply(model, waiting.pop(0), lr)
    for late in waiting:
        apply(model, late, lr)
    return [parameter.detach() for parameter in model.parameters()]


def apply(model: torch.nn.Module, late: Round, lr: float) -> None:
    late.answer()
    descend(model, late.mean(), lr)


def descend(model: torch.nn.Module, gradient: Tensor, lr: float) -> None:
    """One step of gradient descent with a flat gradient."""
    parameters = list(model.parameters())
    pieces = gradient.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.data -= lr * piece.view_as(parameter)


def train_alone_with_delay(steps: int, delay: int, lr: float = 0.1) -> list[Tensor]:
    """One process with the whole batch that applies each gradient ``delay`` steps late."""
    model = small_model()
    waiting: list[Tensor] = []
    for step in range(steps):
        model.zero_grad()
        mean_loss(model, *batch(step)).backward()
        waiting.append(parameters_to_vector(parameter.grad for parameter in model.parameters()))
        if len(waiting) > delay:
            descend(model, waiting.pop(0), lr)
    for gradient in waiting:
        descend(model, gradient, lr)
    return [parameter.detach() for parameter in model.parameters()]


def demo(steps: int = 8) -> list[Check]:
    late = train(steps, delay=2)
    with wire() as sent:
        in_time = train(steps, delay=0)

    size = dist.get_world_size()
    model_bytes = 4 * sum(parameter.numel() for parameter in late)
    # Once in N rounds a process is the server and sends N - 1 sums; in the other rounds
    # it sends one gradient.
    turn = (size - 1) * model_bytes + (size - 1) * model_bytes
    return [
        same("2 steps late, beside one process 2 steps late", late, train_alone_with_delay(steps, 2)),
        same("not late, beside one process", in_time, train_alone_with_delay(steps, 0)),
        count("bytes sent in N steps: 2 (N - 1)", sent.bytes * size // steps, turn),
    ]


if __name__ == "__main__":
    run(demo, processes=4)
