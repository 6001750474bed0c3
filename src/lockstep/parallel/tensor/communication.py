"""What the ranks of one tensor-parallel group send each other, with the gradient of each.

    function          forward                   backward                  Megatron-LM's name
    copy              nothing                   all-reduce                f
    reduce            all-reduce                nothing                   g
    gather            all-gather                own part                  gather from region
    split             own part                  all-gather                scatter to region
    gather_sequence   all-gather                reduce-scatter            g of sequence parallelism
    scatter_sequence  reduce-scatter            all-gather                f of sequence parallelism

Tensors have any shape and dtype; the last four functions change the size of ``dim`` alone, by default 1 of
[batch, sequence, features]. ``split``, ``gather``: what lies on the whole side is computed alike by every rank. A part
is that of ``torch.chunk``, as in DTensor: the last may be smaller or empty.

References: Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., Reducing Activation Recomputation in Large
Transformer Models, MLSys 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.runtime.clock import waiting_for_ranks
from lockstep.torch_internals import c10d
from lockstep.torch_internals.autograd import FunctionContext

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


PART_BEGINS = ("_CopyBackward", "_SplitBackward", "_GatherSequenceBackward")
"""Nodes of a graph whose results are used in parts: behind them each rank has its own."""
PART_ENDS = (
    *("_ReduceBackward", "_GatherBackward", "_ScatterSequenceBackward", "_CrossEntropyBackward"),
    *("_ToTorchTensorBackward", "_FromTorchTensorBackward", "RedistributeBackward"),
)
"""Nodes whose results are whole again, or parts that DTensor knows as such: the last three are its own."""


def part_of(size: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Return (start, length) of this rank's part of ``size`` elements."""
    chunk = -(-size // mesh.size())
    start = min(size, chunk * mesh.get_local_rank())
    return start, min(chunk, size - start)


def part_of_pieces(x: Tensor, pieces: int, rank: int, ranks: int) -> Tensor:
    """Cut [..., features] to [..., features / ranks]: one rank's part of each of ``pieces`` equal pieces,
    concatenated."""
    return torch.cat([piece.chunk(ranks, dim=-1)[rank] for piece in x.chunk(pieces, dim=-1)], dim=-1)


def copy(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Copy ``x``, of any shape, of which each rank will use a part of the result: its gradient is the sum over the
    ranks."""
    return _Copy.apply(x, mesh) if torch.is_grad_enabled() and x.requires_grad else x


def own_gradient(x: Tensor) -> Tensor:
    """Return ``x``, of any shape, whose gradient shares memory with no other one.

    Where nothing is summed, as with one row, autograd hands one tensor to several parameters, and copies it unless
    nobody else refers to it. A DTensor around it hides that others do.
    """
    return _OwnGradient.apply(x) if torch.is_grad_enabled() and x.requires_grad else x


def reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum over the ranks of ``x``, of any shape."""
    return _Reduce.apply(x, mesh)


def gather(x: Tensor, mesh: DeviceMesh, dim: int, size: int) -> Tensor:
    """Return the ranks' parts of dimension ``dim``, concatenated to [..., size, ...]."""
    return _Gather.apply(x, mesh, dim, size)


def split(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return this rank's part along ``dim``: [..., size, ...] to [..., size / ranks, ...]."""
    return _Split.apply(x, mesh, dim)


def gather_sequence(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """Return the ranks' parts [..., length, ...] concatenated to [..., length * ranks, ...].

    Each rank will use a part of the result.
    """
    return _GatherSequence.apply(x, mesh, dim)


def scatter_sequence(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """Return this rank's part of the sum over the ranks: [..., length, ...] to [..., length / ranks, ...]."""
    return _ScatterSequence.apply(x, mesh, dim)


def all_reduce(x: Tensor, mesh: DeviceMesh, operation: str = "sum") -> Tensor:
    """Return the sum (or "max") over the ranks, of the shape and dtype of ``x``, without a gradient."""
    operators, x = c10d.traced(), x.contiguous()
    with waiting_for_ranks():
        return operators.wait_tensor(operators.all_reduce(x, operation, _group(mesh)))


def _all_gather(x: Tensor, mesh: DeviceMesh, dim: int, size: int) -> Tensor:
    """Gather parts [..., n, ...] of dimension ``dim`` to [..., size, ...]; all but the last part are equal."""
    dim %= x.dim()
    chunk = -(-size // mesh.size())
    # A collective wants equal parts.
    if x.shape[dim] < chunk:
        missing = list(x.shape)
        missing[dim] = chunk - x.shape[dim]
        x = torch.cat([x, x.new_zeros(missing)], dim)
    # Gathered along the first dimension, which alone needs no copy.
    operators = c10d.traced()
    first = x.movedim(dim, 0).contiguous()
    with waiting_for_ranks():
        parts = operators.wait_tensor(operators.all_gather_into_tensor(first, mesh.size(), _group(mesh)))
    return parts.narrow(0, 0, size).movedim(0, dim).contiguous()


def _reduce_scatter(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    first = x.movedim(dim, 0).contiguous()
    operators = c10d.traced()
    with waiting_for_ranks():
        part = operators.wait_tensor(operators.reduce_scatter_tensor(first, "sum", mesh.size(), _group(mesh)))
    return part.movedim(0, dim).contiguous()


def _own_part(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    return x.narrow(dim, *part_of(x.shape[dim], mesh)).contiguous()


def _group(mesh: DeviceMesh) -> str:
    return mesh.get_group().group_name


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionContext, gradient: Tensor) -> Tensor:
        return gradient.clone()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, ctx.mesh), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, mesh: DeviceMesh) -> Tensor:
        total = all_reduce(x, mesh)
        # Compiled, torch 2.11 loses the gradient without a view; but views may not be changed in place.
        return total.view_as(x) if torch.compiler.is_compiling() else total

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, mesh: DeviceMesh, dim: int, size: int) -> Tensor:
        ctx.mesh, ctx.dim = mesh, dim
        return _all_gather(x, mesh, dim, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _own_part(gradient, ctx.mesh, ctx.dim), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
        ctx.mesh, ctx.dim, ctx.size = mesh, dim, x.shape[dim]
        return _own_part(x, mesh, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(gradient, ctx.mesh, ctx.dim, ctx.size), None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
        ctx.mesh, ctx.dim = mesh, dim
        return _all_gather(x, mesh, dim, x.shape[dim] * mesh.size())

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(gradient, ctx.mesh, ctx.dim), None, None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
        ctx.mesh, ctx.dim = mesh, dim
        return _reduce_scatter(x, mesh, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(gradient, ctx.mesh, ctx.dim, gradient.shape[ctx.dim] * ctx.mesh.size()), None, None
