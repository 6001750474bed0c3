"""What this rank holds of the parameters of prepared models, by what it is a piece of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.comm.dtensor import boxes_of, local
from lockstep.parallel.prepared import is_pipeline, parts, unwrap
from lockstep.parallel.sharding import sharding_of
from lockstep.torch_internals import fsdp2


class Piece(NamedTuple):
    """Part of a parameter. Ranks that hold the same piece must hold the same bits.

    ``boxes``: (offsets, shape) of what the part consists of within the whole parameter.
    """

    model: int
    name: str
    dtype: str
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def pieces(models: Sequence[nn.Module]) -> dict[Piece, torch.Tensor]:
    """The parameters that this rank holds from step to step, without empty ones."""
    found = {}
    for number, model in enumerate(models):
        for name, parameter in held(model):
            if local(parameter).numel():
                boxes = tuple((box.offsets, box.shape) for box in boxes_of(parameter))
                found[Piece(number, name, str(parameter.dtype), boxes)] = parameter
    return found


def held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, parameter or shard) of each, also where a gathered parameter stands in the model now."""
    named = _named(model)
    names = {id(parameter): name for name, parameter in named}
    shards = dict(_shards(model, names))
    yield from shards.items()
    yield from ((name, parameter) for name, parameter in named if name not in shards)


def leaves(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what autograd computes gradients of: parameters, gathered ones where they are sharded."""
    named = _named(model)
    names = {id(parameter): name for name, parameter in named}
    sharded: set[str] = set()
    for part in parts(model):
        sharding = sharding_of(part)
        for group in sharding.parameter_groups() if sharding is not None else ():
            for record in fsdp2.params(group):
                gathered = fsdp2.unsharded_param(record)
                name = next((names[id(form)] for form in fsdp2.forms(record) if id(form) in names), None)
                if name is not None:
                    sharded.add(name)
                    if gathered is not None and gathered.requires_grad:
                        yield name, gathered
    yield from ((name, p) for name, p in named if name not in sharded and p.requires_grad)


def _named(model: nn.Module) -> list[tuple[str, Any]]:
    inner = model if is_pipeline(model) else unwrap(model, keep_compile=False)
    return list(inner.named_parameters())


def _shards(model: nn.Module, names: dict[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for part in parts(model):
        sharding = sharding_of(part)
        if sharding is not None:
            yield from sharding.shards(names)
