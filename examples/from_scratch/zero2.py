"""ZeRO stage 2: each process keeps the optimizer's state and the gradients of its part of the parameters only.

    python examples/from_scratch/zero2.py

As soon as a gradient is there, it is reduce-scattered: each process keeps its shard of the mean and drops the rest.
So the gradients of the whole model are never in memory at once. The price: with m micro-batches it is done m times.

Paper: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_all_reduce import all_gather, padded, reduce_scatter
from world import Check, adam, batch, count, mean_loss, run, same, share, small_model, train_alone, wire
from zero1 import MICRO_BATCHES, held_bytes


class ShardedGradients:
    """Gradients and optimizer state in shards, parameter by parameter.

    The weights stay whole.
    """

    def __init__(self, model: nn.Module, build: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
        self.shards: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in model.parameters():
            whole = padded(parameter.detach())
            shard = nn.Parameter(share(whole, dist.get_rank(), dist.get_world_size()).clone())
            shard.grad = torch.zeros_like(shard)
            self.shards[parameter] = shard
            parameter.register_post_accumulate_grad_hook(self.reduce)
        self.optimizer = build(list(self.shards.values()))

    def reduce(self, parameter: nn.Parameter) -> None:
        """Called in backward, when this parameter's gradient is complete."""
        shard = self.shards[parameter]
        shard.grad += reduce_scatter(padded(parameter.grad)) / dist.get_world_size()
        # This frees the memory, long before backward comes to the first layer.
        parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        for parameter, shard in self.shards.items():
            parameter.copy_(all_gather(shard.detach())[: parameter.numel()].view_as(parameter))
            shard.grad.zero_()


def train(steps: int = 3) -> tuple[list[Tensor], ShardedGradients]:
    """The trained parameters, the same on every process, and what this process keeps."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = small_model()
    sharded = ShardedGradients(model, adam)
    for step in range(steps):
        inputs, targets = (share(tensor, rank, size) for tensor in batch(step))
        for micro in range(MICRO_BATCHES):
            part = (share(inputs, micro, MICRO_BATCHES), share(targets, micro, MICRO_BATCHES))
            (mean_loss(model, *part) / MICRO_BATCHES).backward()
        sharded.step()
    return [parameter.detach() for parameter in model.parameters()], sharded


def demo(steps: int = 3) -> list[Check]:
    with wire() as sent:
        trained, sharded = train(steps)

    size = dist.get_world_size()
    model_bytes = 4 * sum(parameter.numel() for parameter in trained)
    gradient_bytes = sum(shard.grad.nbytes for shard in sharded.shards.values())
    once = (size - 1) / size * model_bytes
    alone = train_alone(steps, adam)
    return [
        same("parameters, beside one process", trained, alone),
        count("bytes of gradients held: 1 / N", gradient_bytes, model_bytes / size),
        count("bytes of optimizer state held: 2 / N", held_bytes(sharded.optimizer), 2 * model_bytes / size),
        count("bytes sent in a step: (m + 1) (N - 1) / N", sent.bytes // steps, (MICRO_BATCHES + 1) * once),
    ]


if __name__ == "__main__":
    run(demo, processes=4)
