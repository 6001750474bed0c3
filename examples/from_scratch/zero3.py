"""ZeRO stage 3: each process keeps its part of everything, the weights too. Layers are gathered when they compute.

    python examples/from_scratch/zero3.py

Forward gathers a layer's weights, uses them and drops them. Backward gathers them once more, computes the gradient,
and reduce-scatters it. So one layer is whole at a time, and the rest of the model is in N parts.

Paper: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_all_reduce import all_gather, padded, reduce_scatter
from world import Check, adam, batch, count, mean_loss, run, same, share, small_model, train_alone, wire
from zero1 import MICRO_BATCHES, held_bytes


class GatheredLinear(torch.autograd.Function):
    """x W^T + b, where this process has only a shard of W and b."""

    @staticmethod
    def forward(ctx, inputs: Tensor, shard: Tensor, shape: torch.Size) -> Tensor:
        weight, bias = gather(shard, shape)
        # Only the shard is kept for backward. The whole weight is freed when this
        # function returns.
        ctx.save_for_backward(inputs, shard)
        ctx.shape = shape
        return inputs @ weight.T + bias

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        inputs, shard = ctx.saved_tensors
        weight, _ = gather(shard, ctx.shape)
        whole = torch.cat([(gradient.T @ inputs).flatten(), gradient.sum(0)])
        return gradient @ weight, reduce_scatter(padded(whole)) / dist.get_world_size(), None


def gather(shard: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Weight and bias of a layer, from all processes' shards."""
    outputs, inputs = shape
    whole = all_gather(shard)
    return whole[: outputs * inputs].view(shape), whole[outputs * inputs : outputs * (inputs + 1)]


class ShardedLinear(nn.Module):
    """In place of a linear layer.

    Its one parameter is this process's shard of weight and bias.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.shape = layer.weight.shape
        whole = padded(torch.cat([layer.weight.detach().flatten(), layer.bias.detach()]))
        self.shard = nn.Parameter(share(whole, dist.get_rank(), dist.get_world_size()).clone())

    def forward(self, inputs: Tensor) -> Tensor:
        return GatheredLinear.apply(inputs, self.shard, self.shape)


def sharded(model: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(*(ShardedLinear(m) if isinstance(m, nn.Linear) else m for m in model))


def train(steps: int = 3) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """The trained model, in shards, and the optimizer.

    The loop is that of one process.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    model = sharded(small_model())
    optimizer = adam(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = (share(tensor, rank, size) for tensor in batch(step))
        for micro in range(MICRO_BATCHES):
            part = (share(inputs, micro, MICRO_BATCHES), share(targets, micro, MICRO_BATCHES))
            (mean_loss(model, *part) / MICRO_BATCHES).backward()
        optimizer.step()
    return model, optimizer


def whole_parameters(model: nn.Sequential) -> list[Tensor]:
    """The parameters in the order of the plain model, the same on every process."""
    layers = [module for module in model if isinstance(module, ShardedLinear)]
    return [tensor for layer in layers for tensor in gather(layer.shard.detach(), layer.shape)]


def demo(steps: int = 3) -> list[Check]:
    with wire() as sent:
        model, optimizer = train(steps)

    size = dist.get_world_size()
    trained = whole_parameters(model)
    model_bytes = 4 * sum(parameter.numel() for parameter in trained)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    gradient_bytes = sum(parameter.grad.nbytes for parameter in model.parameters())
    once = (size - 1) / size * model_bytes
    alone = train_alone(steps, adam)
    return [
        same("parameters, beside one process", trained, alone),
        count("bytes of weights held: 1 / N", weight_bytes, model_bytes / size),
        count("bytes of gradients held: 1 / N", gradient_bytes, model_bytes / size),
        count("bytes of optimizer state held: 2 / N", held_bytes(optimizer), 2 * model_bytes / size),
        count("bytes sent in a step: 3 m (N - 1) / N", sent.bytes // steps, 3 * MICRO_BATCHES * once),
    ]


if __name__ == "__main__":
    run(demo, processes=4)
