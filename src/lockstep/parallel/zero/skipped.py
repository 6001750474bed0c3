"""Blocks that a rank leaves out of a forward: layers dropped at random, experts or branches chosen in Python.

The blocks of a sharded model are gathered, and their gradients reduced, as they come, so that all ranks must come to
the same blocks in the same order: otherwise one rank's shard of a block meets another rank's shard of another one. So a
block that this rank leaves out is passed through: its weights are gathered and let go, forward and backward, while
its input goes on as it is, and its gradients count as zeros.

That is done for models whose forward comes to its blocks in the order in which they stand in the model. The first
forward that comes to one again, or to an earlier one, ends it for that model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.comm.tree import leaves, map_leaves
from lockstep.torch_internals import fsdp2
from lockstep.torch_internals.autograd import FunctionContext
from lockstep.torch_internals.autograd import current_backward as current_pass
from lockstep.torch_internals.fsdp2_backward import call_empty, is_compiled


class SkippedBlocks:
    """Belongs to one sharded model.

    Args:
        blocks: The modules inside of the model that are gathered by themselves, in the order of the model.
        passed: Called with each block that was passed through.
    """

    def __init__(self, blocks: list[Any], passed: Callable[[object], None]) -> None:
        self._blocks = blocks
        self._passed = passed
        self._is_in_forward = False
        self._next = 0
        nested = any(
            inner is not block and inner in set(blocks) for block in blocks for inner in block.modules()
        )
        # A compiled module runs its hooks inside of what was compiled, where nothing can be counted.
        compiled = any(is_compiled(block) for block in blocks)
        self._is_ordered = not (nested or compiled)
        if self._is_ordered:
            for number, block in enumerate(blocks):
                block.register_forward_pre_hook(
                    partial(self._comes_to, number), prepend=True, with_kwargs=True
                )

    def forward_begins(self) -> None:
        """Of the whole model."""
        self._is_in_forward = self._is_ordered and torch.is_grad_enabled() and current_pass() == -1
        self._next = 0

    def forward_ends(self, module: nn.Module, args: object, output: object) -> object:
        """A forward hook of the whole model, before torch's: pass through the blocks that are left."""
        if not self._is_in_forward:
            return None
        left = range(self._next, len(self._blocks))
        self._next = len(self._blocks)
        return self._pass_through(left, output) if left else None

    def leave(self) -> None:
        """The forward is over, or has raised."""
        self._is_in_forward = False

    def _comes_to(self, number: int, module: nn.Module, args: object, kwargs: object) -> object:
        if not self._is_in_forward or current_pass() != -1:
            return None
        if number < self._next:
            self._is_ordered = self._is_in_forward = False
            return None
        left_out = range(self._next, number)
        self._next = number + 1
        return self._pass_through(left_out, (args, kwargs)) if left_out else None

    def _pass_through(self, numbers: range, values: object) -> object:
        """``values`` again, so that their gradients come by these blocks."""
        carrier = _carrier(values)
        if carrier is None:
            self._is_ordered = self._is_in_forward = False
            return None
        for number in numbers:
            block = self._blocks[number]
            values = call_empty(block, values, partial(_connect, block, carrier))
            self._passed(block)
        return values


def _carrier(values: object) -> str | None:
    """The path of the tensor that gradients go along."""
    found = {
        path: leaf
        for path, leaf in leaves(values).items()
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    }
    return next((path for path, leaf in found.items() if leaf.requires_grad), next(iter(found), None))


def _connect(block: nn.Module, carrier: str, values: object) -> object:
    """Let the carrier require a gradient where what the block returns would: if it has trainable weights."""
    wholes = (fsdp2.unsharded_param(p) for group in fsdp2.param_groups(block) for p in fsdp2.params(group))
    weight = next((whole for whole in wholes if whole is not None and whole.requires_grad), None)
    if weight is None or not torch.is_grad_enabled():
        return values
    return map_leaves(lambda path, leaf: _Along.apply(weight, leaf) if path == carrier else leaf, values)


class _Along(torch.autograd.Function):
    """The same numbers in the same memory; no gradient for the weight."""

    @staticmethod
    def forward(ctx: FunctionContext, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: FunctionContext, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient
