"""Gradient clipping of whole windows."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm.collectives import all_reduce_max
from lockstep.comm.dtensor import local, total_norm
from lockstep.offload import optimizer

Parameters = torch.Tensor | Iterable[torch.Tensor]


def as_list(parameters: Parameters) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


@dataclass(frozen=True)
class OtherStages:
    """Ranks with other parameters of the same models: ``group``, and ``id`` of those that this one does not count."""

    group: dist.ProcessGroup
    uncounted: Collection[int] = ()


def clip_norm(
    parameters: list[torch.Tensor],
    max_norm: float,
    norm_type: float,
    window_ended: bool,
    others: OtherStages | None = None,
    in_files: bool = True,
) -> torch.Tensor:
    """Scale the gradients, in place, so that their total norm is at most ``max_norm``; returns the norm before (0-d).

    The norm is that of the whole gradients, also where each rank holds a shard of them, or ``others`` hold other
    ones; then it is collective. Inside an accumulation window (``window_ended`` False) the partial gradients are left
    alone. ``in_files`` False: none is kept in a file.
    """
    gradients = counted = [p.grad for p in parameters if p.grad is not None]
    if others is not None:
        counted = [p.grad for p in parameters if p.grad is not None and id(p) not in others.uncounted]
    norm_of = optimizer.norm_of if in_files else torch.nn.utils.get_total_norm
    norm = total_norm(counted, float(norm_type), norm_of)
    if others is not None:
        device = parameters[0].device if parameters else norm.device
        norm = _norm_over(norm.to(device), float(norm_type), others.group)
    if window_ended and in_files:
        optimizer.scale_offloaded(gradients, max_norm, norm)
    elif window_ended:
        torch.nn.utils.clip_grads_with_norm_(_local_gradients(parameters, gradients), max_norm, norm)
    return norm


@torch.no_grad()
def _norm_over(norm: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the norm of all ranks' vectors as one."""
    if norm_type == float("inf"):
        largest = norm.clone()
        all_reduce_max(largest, group)
        return largest
    # Powers of norms in half precision would overflow.
    power = norm.to(torch.promote_types(norm.dtype, torch.float32)) ** norm_type
    dist.all_reduce(power, group=group)
    return (power ** (1 / norm_type)).to(norm.dtype)


def clip_value(parameters: list[torch.Tensor], clip: float, window_ended: bool) -> None:
    """Clamp gradients elementwise to [-clip, clip]; inside an accumulation window nothing happens."""
    if window_ended:
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch.nn.utils.clip_grad_value_(_local_gradients(parameters, gradients), clip)


class _LocalGradient(NamedTuple):
    """What torch's clipping functions look at of a parameter: here this rank's part of its gradient."""

    grad: torch.Tensor


def _local_gradients(parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> Any:
    # Mostly; so asked without a call for each.
    if {*map(type, gradients)} <= {torch.Tensor}:
        return parameters
    return [_LocalGradient(local(gradient)) for gradient in gradients]
