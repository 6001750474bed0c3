"""What sharded modules return: never a view.

torch gathers a module's weights for backward in a hook of what the module has returned. Of a view (``x.flatten(1)``,
``x[:, 0]``) the hook is lost when the caller changes it in place (``h += y``), and backward then computes without these
weights; torch warns of it in each process. Here a view is returned as a tensor of its own, in the same memory.
"""

from __future__ import annotations

import torch
from torch import nn

from lockstep.comm.tree import leaves, map_leaves
from lockstep.torch_internals.autograd import FunctionContext
from lockstep.torch_internals.tensors import is_view


def without_views(module: nn.Module, args: object, output: object) -> object:
    """A forward hook: the output, in which no tensor with a gradient is a view."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if isinstance(output, torch.Tensor):
        return _NewTensor.apply(output) if _is_view(output) else None
    if not any(_is_view(leaf) for leaf in leaves(output).values()):
        return None
    return map_leaves(lambda _, leaf: _NewTensor.apply(leaf) if _is_view(leaf) else leaf, output)


def _is_view(leaf: object) -> bool:
    return type(leaf) is torch.Tensor and leaf.requires_grad and is_view(leaf)


class _NewTensor(torch.autograd.Function):
    """The same numbers in the same memory, as a tensor that is no view."""

    @staticmethod
    def forward(ctx: FunctionContext, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: FunctionContext, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
