"""The gradients that one model has accumulated on one rank: taken out, and put back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.comm.dtensor import is_dtensor
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.torch_internals import tensors as torch_tensors


@dataclass
class Accumulated:
    """By the names that the parameters have in the unwrapped model; of tied ones the first.

    - ``local``: this rank's own, not averaged over the ranks yet, in the type in which they are accumulated.
      Sparse ones are dictionaries of their parts.
    - ``reduced``, ``partial``: those of sharded models, which earlier versions saved; always empty now.
    - ``spent``: those that an optimizer has stepped on. What they hold no longer matters, but that there are some
      does: cleared to zeros, they make optimizers step on parameters that were not used since.
    - ``takes_buffers``: whether the next forward of a replica takes rank 0's buffers.
    """

    local: dict[str, Any] = field(default_factory=dict)
    reduced: dict[str, torch.Tensor] = field(default_factory=dict)
    partial: dict[str, object] = field(default_factory=dict)
    spent: list[str] = field(default_factory=list)
    takes_buffers: bool = True

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...] | None]]:
        """Yield (name, shape if known) of each parameter that is mentioned."""
        for name, gradient in self.local.items():
            yield name, tuple(gradient["size"] if isinstance(gradient, dict) else gradient.shape)
        for name in self.spent:
            yield name, None


def layout(model: ParallelModel) -> str:
    """Equal for models whose ranks can take over each other's gradients as they are, in a world of the same size."""
    return "whole" if model.sharding is None else "sharded"


def accumulated(model: ParallelModel, spent: Collection[int]) -> Accumulated:
    """Return what a prepared model has accumulated now. The tensors are the model's own.

    Args:
        spent: ``id`` of each parameter whose gradient an optimizer has stepped on.
    """
    found = Accumulated(takes_buffers=model.takes_buffers)
    for name, parameter in places_of(model).items():
        if id(parameter) in spent and parameter.grad is not None:
            found.spent.append(name)
        elif parameter.grad is not None:
            found.local[name] = _as_parts(parameter.grad.detach())
    return found


def clear(model: ParallelModel) -> None:
    """Forget all gradients of a prepared model."""
    plain, sharding = model.plain, model.sharding
    if sharding is not None:
        shards = [parameter for _, parameter in sharding.shards(names_by_id(plain))]
        sharding.discard_unreduced(shards)
        for parameter in shards:
            parameter.grad = None
    for parameter in nn.Module.parameters(plain):
        parameter.grad = None
    model.takes_buffers = True


@torch.no_grad()
def put_back(model: ParallelModel, own: Accumulated) -> None:
    """Go on with this rank's gradients, bit for bit. Where the model is sharded, there are none but spent ones."""
    places = places_of(model)
    model.mark_used([places[name] for name in own.local])
    for name in own.spent:
        places[name].grad = torch.zeros_like(places[name])
    for name, gradient in own.local.items():
        places[name].grad = _fitted(_from_parts(gradient), places[name])
    model.takes_buffers = own.takes_buffers


def names_by_id(plain: nn.Module) -> dict[int, str]:
    """Return the name of each parameter object that stands in the model now."""
    return {id(parameter): name for name, parameter in plain.named_parameters()}


def places_of(model: ParallelModel) -> dict[str, torch.Tensor]:
    """Return by name the parameters that optimizers hold: shards, also while the whole ones stand in their place."""
    plain, sharding = model.plain, model.sharding
    found: dict[str, torch.Tensor] = dict(plain.named_parameters())
    if sharding is not None:
        found.update(sharding.shards(names_by_id(plain)))
    return found


def _fitted(gradient: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return a copy with the device, dtype and strides of a gradient that autograd makes for ``place``."""
    if gradient.is_sparse:
        return gradient.to(place.device, place.dtype, copy=True)
    if is_dtensor(place):
        return gradient.to(dtype=place.dtype, copy=True)
    return torch.empty_like(place).copy_(gradient)


def _as_parts(gradient: torch.Tensor) -> object:
    if not gradient.is_sparse:
        return gradient
    indices, values = torch_tensors.sparse_parts(gradient)
    return {
        "indices": indices,
        "values": values,
        "size": list(gradient.shape),
        "is_coalesced": gradient.is_coalesced(),
    }


def _from_parts(gradient: torch.Tensor) -> torch.Tensor:
    if not isinstance(gradient, Mapping):
        return gradient
    return torch.sparse_coo_tensor(
        gradient["indices"],
        gradient["values"],
        gradient["size"],
        is_coalesced=gradient["is_coalesced"],
        check_invariants=True,
    )
