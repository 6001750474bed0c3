"""Gradient checkpointing: forget what is inside a block, and compute it again in backward.

    python examples/from_scratch/gradient_checkpointing.py

Backward needs the activations of forward. With many layers they take more memory than the model. Here a block's input
is kept, and nothing inside of it. Backward runs the block's forward once more, and then its backward.

Paper: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from world import Check, count, run, same

BLOCKS, WIDTH = 6, 16


class Checkpointed(torch.autograd.Function):
    """A block's forward of which only the input is kept.

    The parameters are arguments so that autograd knows that the output depends on them.
    """

    @staticmethod
    def forward(ctx, block: nn.Module, inputs: Tensor, *parameters: Tensor) -> Tensor:
        ctx.block = block
        # Dropout must drop the same numbers when it runs again.
        ctx.random_state = torch.get_rng_state()
        ctx.save_for_backward(inputs)
        return block(inputs)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        inputs = saved.detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.random_state)
            outputs = ctx.block(inputs)
        return None, *torch.autograd.grad(outputs, [inputs, *ctx.block.parameters()], gradient)


def checkpointed(block: nn.Module, inputs: Tensor) -> Tensor:
    return Checkpointed.apply(block, inputs, *block.parameters())


class Block(nn.Module):
    """A feed-forward network beside a residual connection.

    It counts how often its forward runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return inputs + self.dropout(self.down(nn.functional.gelu(self.up(inputs))))


class Model(nn.Module):
    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.checkpointing = checkpointing

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = checkpointed(block, inputs) if self.checkpointing else block(inputs)
        return inputs


@contextmanager
def kept_bytes(model: nn.Module) -> Iterator[dict[int, int]]:
    """The tensors, without parameters, that autograd keeps for backward: address to size in bytes."""
    kept: dict[int, int] = {}
    parameters = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def gradients(checkpointing: bool, inputs: Tensor) -> tuple[list[Tensor], int, int]:
    """All gradients, the bytes that forward kept for backward, and how often a block's forward ran."""
    model = Model(checkpointing)
    torch.manual_seed(1)
    with kept_bytes(model) as kept:
        outputs = model(inputs)
    outputs.square().mean().backward()
    found = [parameter.grad for parameter in model.parameters()]
    return found, sum(kept.values()), sum(block.calls for block in model.blocks)


def demo(rows: int = 32) -> list[Check]:
    inputs = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(2))
    plain, plain_bytes, plain_calls = gradients(False, inputs)
    ours, our_bytes, our_calls = gradients(True, inputs)
    # A block keeps its input, what goes into gelu (4 times as wide), what comes out,
    # and dropout's mask.
    inside = 1 + 4 + 4 + 1
    return [
        same("gradients, beside no checkpointing", ours, plain, within=0),
        count("bytes kept without: 10 a block", plain_bytes, BLOCKS * inside * inputs.nbytes),
        count("bytes kept with: 1 a block", our_bytes, BLOCKS * inputs.nbytes),
        count("forwards without", plain_calls, BLOCKS),
        count("forwards with", our_calls, 2 * BLOCKS),
    ]


if __name__ == "__main__":
    run(demo, processes=1)
