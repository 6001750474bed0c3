"""Batch normalisation over the batches of all ranks, so that several processes give the numbers of one.

torch's ``SyncBatchNorm`` does it on accelerators only. The one here computes on any device what ``nn.BatchNorm1d`` to
``3d`` compute on one process, with n the number of values of a channel on all ranks (each may have another number):

    mean = sum(x) / n    variance = sum((x - mean)^2) / n    running variance: sum((x - mean)^2) / (n - 1)

Two sums are added up over the ranks in forward, and two in backward.
References: Ioffe and Szegedy, Batch Normalization, ICML 2015; ``torch.nn.SyncBatchNorm``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from lockstep.errors import UsageError
from lockstep.model.changes import Subclassed, subclass
from lockstep.runtime.clock import waiting_for_ranks
from lockstep.torch_internals.autograd import FunctionContext
from lockstep.torch_internals.modules import check_input_dim

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def synchronize_batchnorm(model: nn.Module, group: dist.ProcessGroup | None) -> list[str]:
    """Let each batch normalisation of a model take its statistics over ``group``, in place. Returns their names.

    The modules keep their parameters, buffers, names and hooks; their class becomes a subclass of their own.

    Raises:
        UsageError: one of them does not know its number of channels yet.
    """
    changed = []
    for name, module in model.named_modules():
        if not isinstance(module, BATCH_NORMS) or isinstance(module, (nn.SyncBatchNorm, _Synchronized)):
            continue
        if isinstance(module, LazyModuleMixin):
            raise UsageError(
                f"'{name}' is a {type(module).__name__}, which does not know its number of channels yet. Run a batch "
                "through the model before accelerator.prepare(), or drop sync_batchnorm."
            )
        module.__class__ = subclass(type(module), _Synchronized, _group=group)
        changed.append(name)
    return changed


@contextmanager
def unsynchronized(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let batch normalisations of these modules take statistics of their own batch inside, also
    ``nn.SyncBatchNorm``."""
    changed = [module for module in modules if isinstance(module, (_Synchronized, nn.SyncBatchNorm))]
    changed = [module for module in changed if "forward" not in vars(module)]
    for module in changed:
        after: Any = _Synchronized if isinstance(module, _Synchronized) else nn.SyncBatchNorm
        # The class stays as it is: only this object calls what stands behind the synchronised class.
        vars(module)["forward"] = super(after, module).forward
    try:
        yield
    finally:
        for module in changed:
            del vars(module)["forward"]


class _Synchronized(Subclassed, nn.Module):
    """Before a class of batch normalisation in the order of inheritance: its forward with the statistics of batches."""

    _group: dist.ProcessGroup | None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [batch, channels, ...]."""
        this: Any = self
        takes_batch = this.training or (this.running_mean is None and this.running_var is None)
        if not takes_batch or dist.get_world_size(self._group) == 1:
            return super().forward(x)
        check_input_dim(this, x)
        momentum = 0.0 if this.momentum is None else this.momentum
        if this.training and this.track_running_stats and this.num_batches_tracked is not None:
            this.num_batches_tracked.add_(1)
            if this.momentum is None:
                momentum = 1.0 / float(this.num_batches_tracked)
        result: tuple[Tensor, Tensor, Tensor, Tensor] = _Normalize.apply(x, this.eps, self._group)
        normalized, mean, variance, count = result
        if this.training and this.track_running_stats and this.running_mean is not None:
            with torch.no_grad():
                # Normalised with sum / n, but running statistics take sum / (n - 1), as torch's do.
                unbiased = variance * (count / (count - 1).clamp(min=1))
                this.running_mean.lerp_(mean.to(this.running_mean.dtype), momentum)
                this.running_var.lerp_(unbiased.to(this.running_var.dtype), momentum)
        if this.weight is None:
            return normalized
        shape = [1, -1] + [1] * (x.dim() - 2)
        return (normalized * this.weight.view(shape) + this.bias.view(shape)).to(x.dtype)


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) of ``x`` [batch, channels, ...], and the statistics of all ranks.

    Returns the result, in the shape and dtype of ``x``, mean and variance [channels], in float32 or more, and the
    number of values of a channel (0-d). Ranks may have batches of different sizes, or empty ones.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext, x: Tensor, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        count = wide.new_full((1,), x.numel() // x.size(1) if x.size(1) else 0)
        # One message has the sums of all channels, and behind them the number of values.
        first = torch.cat([wide.sum(dims), count])
        with waiting_for_ranks():
            dist.all_reduce(first, group=group)
        count = first[-1]
        if x.device.type == "cpu" and count <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)} on all ranks"
            )
        mean = first[:-1] / count
        centred = wide - mean.view(shape)
        # Of what is centred: a difference of large numbers would lose digits.
        squares = centred.pow(2).sum(dims)
        with waiting_for_ranks():
            dist.all_reduce(squares, group=group)
        variance = squares / count
        scale = (variance + eps).rsqrt()
        normalized = centred * scale.view(shape)
        ctx.save_for_backward(normalized, scale, count)
        ctx.group, ctx.dims, ctx.shape, ctx.dtype = group, dims, shape, x.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return normalized.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: FunctionContext, gradient: Tensor, *_: object) -> tuple[Tensor, None, None]:
        # dx = scale (g - mean(g) - y mean(g y)), with the means over the values of all ranks: two sums are exchanged.
        normalized, scale, count = ctx.saved_tensors
        wide = gradient.to(normalized.dtype)
        sums = torch.stack([wide.sum(ctx.dims), (wide * normalized).sum(ctx.dims)])
        with waiting_for_ranks():
            dist.all_reduce(sums, group=ctx.group)
        of_mean, of_scale = (sums / count).view(2, *ctx.shape)
        result = (wide - of_mean - normalized * of_scale) * scale.view(ctx.shape)
        return result.to(ctx.dtype), None, None
