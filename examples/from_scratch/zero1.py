"""ZeRO stage 1: each process keeps the optimizer's state of its part of the parameters only.

    python examples/from_scratch/zero1.py

Adam keeps two numbers for each parameter. With data parallel training every process has all of them, and all
compute the same step. Here, process r steps the r-th of N parts, and then the parts are gathered.

Paper: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ring_all_reduce import all_gather, padded, reduce_scatter
from world import Check, adam, batch, count, mean_loss, run, same, share, small_model, train_alone, wire

MICRO_BATCHES = 2
"""Gradients of so many backward passes are added up before a step."""


class ShardedOptimizer:
    """An optimizer of which each process has a part, its shard.

    All parameters count as one long vector.
    """

    def __init__(self, model: nn.Module, build: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
        self.parameters = list(model.parameters())
        self.length = sum(parameter.numel() for parameter in self.parameters)
        whole = padded(parameters_to_vector(self.parameters).detach())
        self.shard = nn.Parameter(share(whole, dist.get_rank(), dist.get_world_size()).clone())
        # The optimizer does not know that it sees only a part. Adam treats each number
        # by itself, so that is right.
        self.optimizer = build([self.shard])

    def step(self) -> None:
        gradient = padded(parameters_to_vector(parameter.grad for parameter in self.parameters))
        self.shard.grad = reduce_scatter(gradient) / dist.get_world_size()
        self.optimizer.step()
        vector_to_parameters(all_gather(self.shard.detach())[: self.length], self.parameters)


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The size of the optimizer's state, without its step counters."""
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return sum(tensor.nbytes for tensor in tensors if tensor.dim() > 0)


def train(steps: int = 3) -> tuple[list[Tensor], ShardedOptimizer]:
    """The trained parameters, the same on every process, and this process's optimizer."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = small_model()
    optimizer = ShardedOptimizer(model, adam)
    for step in range(steps):
        model.zero_grad()
        inputs, targets = (share(tensor, rank, size) for tensor in batch(step))
        for micro in range(MICRO_BATCHES):
            part = (share(inputs, micro, MICRO_BATCHES), share(targets, micro, MICRO_BATCHES))
            (mean_loss(model, *part) / MICRO_BATCHES).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], optimizer


def demo(steps: int = 3) -> list[Check]:
    with wire() as sent:
        trained, optimizer = train(steps)

    size = dist.get_world_size()
    model_bytes = 4 * sum(parameter.numel() for parameter in trained)
    alone = train_alone(steps, adam)
    return [
        same("parameters, beside one process", trained, alone),
        count("bytes of weights held", sum(tensor.nbytes for tensor in trained), model_bytes),
        count(
            "bytes of optimizer state held: 2 / N", held_bytes(optimizer.optimizer), 2 * model_bytes / size
        ),
        count(
            "bytes sent in a step: 2 (N - 1) / N", sent.bytes // steps, 2 * (size - 1) / size * model_bytes
        ),
    ]


if __name__ == "__main__":
    run(demo, processes=4)
