"""Cross entropy of logits that are split over the vocabulary: no rank ever has all logits of a token.

    loss = log(sum_v exp(x_v - m)) + m - x_target,   m = max_v x_v

The maximum, the sum and the target's logit are reduced over the ranks: three numbers for each token, in place of a
vocabulary.

Reference: Shoeybi et al., Megatron-LM, 2019, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.comm.dtensor import is_dtensor
from lockstep.comm.tree import Args, Kwargs
from lockstep.errors import UsageError
from lockstep.parallel.tensor.communication import all_reduce, part_of
from lockstep.torch_internals import dtensor
from lockstep.torch_internals.autograd import FunctionContext

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# As in the schemas of aten.
MEAN, SUM = 1, 2


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute ``F.cross_entropy`` of logits whose classes are split over the ranks. Call it on all of these ranks.

    Reference: Shoeybi et al., Megatron-LM, 2019, section 3.

    Args:
        logits: A DTensor [..., classes] on a 1-D mesh, split along its last dimension. It may have any floating-point
            dtype; the loss is computed in fp32 or more.
        target: Indices of classes, [...]: a plain tensor with the same values on all ranks.
        ignore_index: Positions with this target do not count.
        reduction: ``"mean"`` (over targets other than ``ignore_index``), ``"sum"`` or ``"none"``.
        label_smoothing: The part of the target's probability that is spread over all classes, 0 to 1.

    Returns:
        The loss as a plain tensor, the same on all ranks.

    Raises:
        UsageError: the logits are not split along their last dimension, or the shapes differ.

    Examples:
        ```python
        import torch
        from torch.distributed.tensor import Shard, distribute_tensor
        from lockstep import debug_launcher
        from lockstep.nn import vocab_parallel_cross_entropy

        def check() -> None:
            mesh = torch.distributed.init_device_mesh("cpu", (2,))
            logits, target = torch.arange(20.0).view(2, 10).sin(), torch.tensor([3, 9])
            split = distribute_tensor(logits, mesh, [Shard(1)])  # 5 classes on each rank
            loss = vocab_parallel_cross_entropy(split, target)
            torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, target))

        debug_launcher(check, num_processes=2)
        ```
    """
    split = cast("DTensor", logits)
    if not (is_dtensor(logits) and _is_split(split, logits.dim() - 1)):
        raise UsageError(
            "vocab_parallel_cross_entropy needs logits that are split over their last dimension, as a model "
            "prepared with loss_parallel returns them in training. Use torch.nn.functional.cross_entropy for "
            "other logits."
        )
    if target.shape != logits.shape[:-1]:
        raise UsageError(
            f"Logits of shape {tuple(logits.shape)} need a target of shape {tuple(logits.shape[:-1])}, but it is "
            f"{tuple(target.shape)}. Pass one class index for each row of logits."
        )
    losses = _CrossEntropy.apply(
        split.to_local(), target, split.device_mesh, split.shape[-1], ignore_index, label_smoothing
    )
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    """Logits [..., classes / N] of this rank and targets [...] to losses [...], in float32 or more.

    For each target travel the maximum of all logits, then in one message the sum of their exponentials, the target's
    logit and the sum of all (for smoothing). Backward needs no rank but this one: the gradient of its logits is softmax
    minus the target's one-hot row.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext,
        local: Tensor,
        target: Tensor,
        mesh: DeviceMesh,
        classes: int,
        ignored: int,
        smoothing: float,
    ) -> Tensor:
        x = local.to(torch.promote_types(local.dtype, torch.float32))
        place, is_here = _local_indices(target, mesh, classes)
        # The maximum over all ranks is subtracted, so that no exponential overflows.
        largest = all_reduce(x.amax(-1), mesh, "max")
        exponentials = (x - largest.unsqueeze(-1)).exp()
        at_target = x.gather(-1, place.unsqueeze(-1)).squeeze(-1).masked_fill(~is_here, 0.0)
        # One message for the three sums, [3, ...].
        sums = all_reduce(torch.stack([exponentials.sum(-1), at_target, x.sum(-1)]), mesh)
        normaliser = sums[0].log() + largest
        # log(sum exp(x)) - (1 - s) x_target - s mean(x)
        losses = normaliser - (1 - smoothing) * sums[1] - smoothing / classes * sums[2]
        counts = target != ignored
        # Softmax, in the memory of the exponentials: as large as this rank's logits, and the only large tensor that
        # is kept.
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), place, is_here, counts)
        ctx.classes, ctx.smoothing, ctx.dtype = classes, smoothing, local.dtype
        return losses.masked_fill(~counts, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        softmax, place, is_here, counts = ctx.saved_tensors
        # softmax - smoothing / classes - (1 - smoothing) * one-hot row of the target
        result = softmax - ctx.smoothing / ctx.classes
        result.scatter_add_(-1, place.unsqueeze(-1), -(1 - ctx.smoothing) * is_here.to(result).unsqueeze(-1))
        result *= (gradient * counts).unsqueeze(-1)
        return result.to(ctx.dtype), None, None, None, None, None


def _local_indices(target: Tensor, mesh: DeviceMesh, classes: int) -> tuple[Tensor, Tensor]:
    """Return (index of each target [...] among this rank's classes, whether it is there); 0 where it is not."""
    start, length = part_of(classes, mesh)
    place = target - start
    is_here = (place >= 0) & (place < length)
    return place.masked_fill(~is_here, 0), is_here


# -- torch.nn.functional.cross_entropy, as a plain loop calls it ----------------------------------------


def handle_split_logits() -> None:
    """Let ``F.cross_entropy`` and ``F.log_softmax`` take split logits, in this process from now on.

    torch's ``loss_parallel`` does the same inside a context that must span forward and backward; leaving such a
    context forgets these handlers, so this is called as each forward ends. The loss is a plain tensor.
    """
    dtensor.probe()
    dtensor.handle_operators(_HANDLERS)


def _is_split(x: DTensor, dim: int) -> bool:
    return len(x.placements) == 1 and x.placements[0].is_shard(dim)


def _dim(x: Tensor, dim: int) -> int:
    return dim % x.dim()


def _dtensor_like(local: Tensor, x: DTensor, dtype: torch.dtype | None = None) -> object:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local if dtype is None else local.to(dtype),
        x.device_mesh,
        x.placements,
        run_check=False,
        shape=x.shape,
        stride=torch.empty(x.shape, device="meta").stride(),
    )


def _log_softmax(operator: object, args: Args, kwargs: Kwargs) -> object:
    x, dim, half_to_float = args
    dim = _dim(x, dim)
    local = dtensor.local_tensor(x)
    if not _is_split(x, dim):
        return _dtensor_like(torch.log_softmax(_on_whole(x, dim), dim), x)
    wide = local.to(torch.promote_types(local.dtype, torch.float32))
    # (x - m) - log(sum exp(x - m)), with the maximum and the sum over all classes
    shifted = wide - all_reduce(wide.amax(dim, keepdim=True), x.device_mesh, "max")
    total = all_reduce(shifted.exp().sum(dim, keepdim=True), x.device_mesh)
    return _dtensor_like(shifted - total.log(), x, torch.float32 if half_to_float else local.dtype)


def _log_softmax_backward(operator: object, args: Args, kwargs: Kwargs) -> object:
    gradient, output, dim, dtype = args
    dim = _dim(output, dim)
    given = dtensor.local_tensor(gradient.redistribute(output.device_mesh, output.placements))
    # dx = dy - softmax * sum(dy), with the sum over all classes
    total = given.sum(dim, keepdim=True)
    if _is_split(output, dim):
        total = all_reduce(total, output.device_mesh)
    return _dtensor_like(given - dtensor.local_tensor(output).exp() * total, output, dtype)


def _nll_loss(operator: object, args: Args, kwargs: Kwargs) -> object:
    x, target, weight, reduction, ignored = args
    local, target, mesh, classes = _class_rows(x, target)
    place, is_here = _local_indices(target, mesh, classes)
    at_target = local.gather(-1, place.unsqueeze(-1)).squeeze(-1).masked_fill(~is_here, 0.0)
    counts = _counts(target, weight, ignored, local)
    losses = -all_reduce(at_target, mesh) * counts
    if reduction == 0:
        return losses, local.new_zeros(())
    total = counts.sum()
    return (losses.sum() / total if reduction == MEAN else losses.sum()), total


def _nll_loss_backward(operator: object, args: Args, kwargs: Kwargs) -> object:
    gradient, x, target, weight, reduction, ignored, total = args
    local, target, mesh, classes = _class_rows(x, target)
    place, is_here = _local_indices(target, mesh, classes)
    scale = -gradient * _counts(target, weight, ignored, local)
    if reduction == MEAN:
        scale = scale / total
    result = torch.zeros_like(local).scatter_(-1, place.unsqueeze(-1), (scale * is_here).unsqueeze(-1))
    # [batch, ..., classes / N] -> [batch, classes / N, ...], as the logits are laid out
    return _dtensor_like(result if x.dim() < 3 else result.movedim(-1, 1), x)


def _class_rows(x: DTensor, target: Tensor) -> tuple[Tensor, Tensor, DeviceMesh, int]:
    """Return (local logits [..., classes / N], target [...], mesh, classes) of logits [classes] or [batch, classes,
    ...]."""
    dim = 1 if x.dim() > 1 else 0
    if not _is_split(x, dim):
        raise UsageError(
            f"The loss was given log-probabilities that are laid out as {x.placements} and not split over the classes "
            f"(dimension {dim}). Pass logits as the model returned them, reshaped to [tokens, classes], or turn "
            "loss_parallel off."
        )
    plain = target.full_tensor() if is_dtensor(target) else target
    return dtensor.local_tensor(x).movedim(dim, -1), plain, x.device_mesh, x.shape[dim]


def _counts(target: Tensor, weight: Tensor | None, ignored: int, like: Tensor) -> Tensor:
    """Return the weight of each target in the loss, in the shape of ``target``: 0 for those that are ignored."""
    counts = (target != ignored).to(like.dtype)
    return counts if weight is None else counts * weight[target.masked_fill(target == ignored, 0)]


def _on_whole(x: DTensor, dim: int) -> Tensor:
    if any(not (p.is_replicate() or (p.is_shard() and not p.is_shard(dim))) for p in x.placements):
        raise UsageError(
            f"A softmax over dimension {dim} of a DTensor laid out as {x.placements} is not supported. "
            "Redistribute it first."
        )
    return dtensor.local_tensor(x)


_HANDLERS = {
    dtensor.LOG_SOFTMAX: _log_softmax,
    dtensor.LOG_SOFTMAX_BACKWARD: _log_softmax_backward,
    torch.ops.aten.nll_loss_forward.default: _nll_loss,
    torch.ops.aten.nll_loss2d_forward.default: _nll_loss,
    torch.ops.aten.nll_loss_backward.default: _nll_loss_backward,
    torch.ops.aten.nll_loss2d_backward.default: _nll_loss_backward,
}
