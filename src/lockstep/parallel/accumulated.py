"""The gradients that one model has accumulated on one rank: taken out, and put back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import nn

from lockstep.comm.dtensor import is_dtensor, shard_like
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.zero.unreduced import PartialSum, is_used, put_unreduced, take_unreduced
from lockstep.torch_internals import tensors as torch_tensors


@dataclass
class Accumulated:
    """By the names that the parameters have in the unwrapped model; of tied ones the first.

    - ``local``: this rank's own, not averaged over the ranks yet, in the type in which they are accumulated.
      Sparse ones are dictionaries of their parts.
    - ``reduced``: averaged over all ranks, and sharded as the parameters are (DTensor).
    - ``partial``: averaged over the shards of one replica and not over the replicas; see ``PartialSum``.
    - ``spent``: those that an optimizer has stepped on. What they hold no longer matters, but that there are some
      does: cleared to zeros, they make optimizers step on parameters that were not used since.
    - ``takes_buffers``: whether the next forward of a replica takes rank 0's buffers.
    """

    local: dict[str, Any] = field(default_factory=dict)
    reduced: dict[str, torch.Tensor] = field(default_factory=dict)
    partial: dict[str, PartialSum] = field(default_factory=dict)
    spent: list[str] = field(default_factory=list)
    takes_buffers: bool = True

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...] | None]]:
        """(name, shape if known) of each parameter that is mentioned."""
        for name, gradient in self.local.items():
            yield name, tuple(gradient["size"] if isinstance(gradient, dict) else gradient.shape)
        for name, gradient in self.reduced.items():
            yield name, tuple(gradient.shape)
        for group in self.partial.values():
            for row in group["rows"]:
                yield row["name"], None
        for name in self.spent:
            yield name, None

    def names(self) -> set[str]:
        """Of the parameters whose gradients matter."""
        partial = (row["name"] for group in self.partial.values() for row in group["rows"] if is_used(row))
        return {*self.local, *self.reduced, *partial}


def layout(model: ParallelModel) -> str:
    """Equal for models whose ranks can take over each other's gradients as they are, in a world of the same size."""
    return "whole" if model.sharding is None else model.sharding.layout


def accumulated(model: ParallelModel, spent: Collection[int]) -> Accumulated:
    """Return what a prepared model has accumulated now. The tensors are the model's own.

    Args:
        spent: ``id`` of each parameter whose gradient an optimizer has stepped on.
    """
    plain, sharding = model.plain, model.sharding
    found = Accumulated()
    inside: set[str] = set()
    if sharding is not None:
        take_unreduced(sharding, names_by_id(plain), found.local, found.partial)
        for name, parameter in sharding.shards(names_by_id(plain)):
            inside.add(name)
            if parameter.grad is None:
                continue
            if id(parameter) in spent:
                found.spent.append(name)
            else:
                found.reduced[name] = parameter.grad.detach()
    for name, parameter in plain.named_parameters():
        if name in inside or parameter.grad is None:
            continue
        if id(parameter) in spent:
            found.spent.append(name)
        else:
            found.local[name] = _as_parts(parameter.grad.detach())
    found.takes_buffers = model.takes_buffers
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
def put_back(model: ParallelModel, states: list[Accumulated], rank: int) -> None:
    """Go on with this rank's gradients, bit for bit. Collective for sharded models.

    ``states`` are those of all ranks, of a model of the same layout in a world of the same size.
    """
    plain, sharding = model.plain, model.sharding
    own = states[rank]
    places = places_of(model)
    model.mark_used([places[name] for name in own.local if name in places])
    inside: set[str] = set()
    if sharding is not None:
        names = names_by_id(plain)
        inside = {name for name, _ in sharding.shards(names)}
        put_unreduced(
            sharding, names, own.local, own.partial, set().union(*(state.local for state in states))
        )
    for name in own.spent:
        places[name].grad = torch.zeros_like(places[name])
    for name, gradient in own.reduced.items():
        places[name].grad = _fitted(gradient, places[name])
    for name, gradient in own.local.items():
        if name not in inside:
            places[name].grad = _fitted(_from_parts(gradient), places[name])
    model.takes_buffers = own.takes_buffers


@torch.no_grad()
def put_mean(model: ParallelModel, states: list[Accumulated], shares: list[float]) -> None:
    """Go on with the mean gradient of all ranks of another world or another layout.

    Every rank gets it as its own, or its shard of it, so that the mean over the ranks stays what it is.

    Args:
        states: Of all ranks that saved; ``reduced`` is laid out as the parameters are here, or whole.
        shares: Each rank's part in the mean of ``local``; their sum is 1.
    """
    places = places_of(model)
    names = set().union(*(state.names() for state in states))
    model.mark_used([places[name] for name in names])
    for name in sorted(set().union(*(state.spent for state in states)) - names):
        places[name].grad = torch.zeros_like(places[name])
    for name in sorted(names):
        place = places[name]
        place.grad = _fitted(reduce(add, _parts_of_mean(name, place, states, shares)), place)


def names_by_id(plain: nn.Module) -> dict[int, str]:
    """Return the name of each parameter object that stands in the model now."""
    return {id(parameter): name for name, parameter in plain.named_parameters()}


def places_of(model: ParallelModel) -> dict[str, torch.Tensor]:
    """By name, the parameters that optimizers hold: shards, also while the whole ones stand in their place."""
    plain, sharding = model.plain, model.sharding
    found: dict[str, torch.Tensor] = dict(plain.named_parameters())
    if sharding is not None:
        found.update(sharding.shards(names_by_id(plain)))
    return found


def _parts_of_mean(
    name: str, place: torch.Tensor, states: list[Accumulated], shares: list[float]
) -> Iterator[torch.Tensor]:
    """Return the addends, each laid out like ``place``: the ranks' own gradients, partial sums, and what is averaged.

    A partial sum is flat: ``count`` rows of the parameter, [count, ...], begin at ``offset``. Its factor makes a mean
    over shards of it, and each replica has its share in the mean over all ranks.
    """
    # The parts of the ranks are added up: in less than float32 small ones would be lost.
    exact = torch.promote_types(place.dtype, torch.float32)
    whole: torch.Tensor | None = None
    for state, share in zip(states, shares, strict=True):
        gradient = state.local.get(name)
        if gradient is not None:
            part = _from_parts(gradient).to(place.device, exact) * share
            whole = part if whole is None else whole + part
        for group in state.partial.values():
            for row in (row for row in group["rows"] if row["name"] == name):
                if whole is None:
                    whole = torch.zeros(place.shape, dtype=exact, device=place.device)
                # Of the flat sum, the rows ``start`` to ``start + count`` of this parameter.
                numbers = group["sum"][row["offset"] :][: row["count"] * place.shape[1:].numel()]
                rows = numbers.view(row["count"], *place.shape[1:]).to(place.device, exact)
                whole[row["start"] : row["start"] + row["count"]] += rows * (
                    group["factor"] / group["replicas"]
                )
    if whole is not None:
        yield shard_like(whole, place)
    reduced = next((state.reduced[name] for state in states if name in state.reduced), None)
    # It is the mean over all ranks already, so that the one of any state does.
    if reduced is not None:
        yield shard_like(reduced, place).to(exact)


def _fitted(gradient: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return a copy with the device, dtype and strides of a gradient that autograd makes for ``place``."""
    gradient = shard_like(gradient.detach(), place)
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
