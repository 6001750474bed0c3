"""What this rank holds of the parameters of prepared models, by what it is a piece of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from lockstep.comm.dtensor import boxes_of, local
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.torch_internals import fsdp2


class ParameterShard(NamedTuple):
    """Part of a parameter. Ranks that hold the same piece must hold the same bits.

    ``boxes``: (offsets, shape) of what the part consists of within the whole parameter.
    """

    model: int
    name: str
    dtype: str
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def pieces(models: Sequence[ParallelModel]) -> dict[ParameterShard, torch.Tensor]:
    """The parameters that this rank holds from step to step, without empty ones."""
    found = {}
    for number, model in enumerate(models):
        for name, parameter in local_parameters(model):
            if local(parameter).numel():
                boxes = tuple((box.offsets, box.shape) for box in boxes_of(parameter))
                found[ParameterShard(number, name, str(parameter.dtype), boxes)] = parameter
    return found


def local_parameters(model: ParallelModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, parameter or shard) of each, also where a gathered parameter stands in the model now."""
    named = list(model.named_parameters())
    names = {id(parameter): name for name, parameter in named}
    shards = {name: shard for sharding in model.shardings for name, shard in sharding.shards(names)}
    yield from shards.items()
    yield from ((name, parameter) for name, parameter in named if name not in shards)


def autograd_leaves(model: ParallelModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what autograd computes gradients of: parameters, gathered ones where they are sharded."""
    named = list(model.named_parameters())
    names = {id(parameter): name for name, parameter in named}
    sharded: set[str] = set()
    for sharding in model.shardings:
        for group in sharding.parameter_groups():
            for record in fsdp2.params(group):
                gathered = fsdp2.unsharded_param(record)
                name = next((names[id(form)] for form in fsdp2.forms(record) if id(form) in names), None)
                if name is not None:
                    sharded.add(name)
                    if gathered is not None and gathered.requires_grad:
                        yield name, gathered
    yield from ((name, p) for name, p in named if name not in sharded and p.requires_grad)
