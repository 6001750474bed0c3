"""Gradients of sharded models on their way: not averaged over the ranks yet, or over some of them only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypedDict

import torch

from lockstep.errors import CheckpointError
from lockstep.parallel.sharding import Sharding, name_of, parameter_groups


class Rows(TypedDict):
    """Where ``count`` rows of a parameter, from row ``start``, begin in a flat tensor."""

    name: str
    offset: int
    start: int
    count: int


class PartialSum(TypedDict):
    """One group's gradients, reduced over the shards of one replica and not over the ``replicas``.

    ``sum`` is flat; times ``factor`` it is the mean over the shards. ``rows`` says whose they are; empty where
    only some of the group's parameters have gradients: torch does not say which.
    """

    sum: torch.Tensor
    rows: list[Rows]
    factor: float
    replicas: int


def take_unreduced(
    sharding: Sharding,
    names: Mapping[int, str],
    local: dict[str, Any],
    partial: dict[str, PartialSum],
) -> None:
    """Put what was not reduced to shards of all ranks into ``local`` (by name) and ``partial`` (by a group's first)."""
    for group in sharding.parameter_groups():
        for parameter in group.fsdp_params:
            gradients = [parameter.unsharded_accumulated_grad]
            gradients.append(getattr(getattr(parameter, "_unsharded_param", None), "grad", None))
            found = [gradient.detach() for gradient in gradients if gradient is not None]
            if found:
                local[name_of(parameter, names)] = found[0] if len(found) == 1 else found[0] + found[1]
        output = getattr(group, "_partial_reduce_output", None)
        if output is not None:
            mesh = group.mesh_info
            shards, replicas = mesh.shard_mesh_size, mesh.replicate_mesh_size
            partial[name_of(group.fsdp_params[0], names)] = {
                "sum": output.detach(),
                "rows": _rows(group, names, output.numel()),
                "factor": mean_factor(output.dtype, shards, replicas),
                "replicas": replicas,
            }


@torch.no_grad()
def put_unreduced(
    sharding: Sharding,
    names: Mapping[int, str],
    local: Mapping[str, torch.Tensor],
    partial: Mapping[str, PartialSum],
    anywhere: Collection[str],
) -> None:
    """Put them back, in copies. Collective.

    Args:
        anywhere: Names of the parameters that have local gradients on any rank.
    """
    for module in sharding.modules:
        for group in parameter_groups(module):
            given = partial.get(name_of(group.fsdp_params[0], names))
            if given is not None:
                group._partial_reduce_output = given["sum"].to(group.device, copy=True)
            named = {name_of(parameter, names): parameter for parameter in group.fsdp_params}
            if named.keys() & set(anywhere):
                module.unshard()  # torch makes the tensors that have these gradients when it gathers
                for name, parameter in named.items():
                    if name in local:
                        _put_local(parameter, local[name])
                module.reshard()


def check_partial(partial: Mapping[str, PartialSum]) -> None:
    """Raise CheckpointError unless all rows can be told apart, as another world needs."""
    for first, group in partial.items():
        if not group["rows"]:
            raise CheckpointError(
                f"In the group of parameters that begins with '{first}' some had no gradient when the checkpoint was "
                "saved inside an accumulation window of replicated shards, so that it can only be loaded by as many "
                "ranks with the same 'parallel'. Do that, or load a checkpoint from the end of a window."
            )


def _put_local(parameter: Any, gradient: torch.Tensor) -> None:
    whole = parameter._unsharded_param
    gradient = gradient.to(whole.device, copy=True).view(whole.shape)
    if gradient.dtype == whole.dtype:
        whole.grad = gradient
    else:  # accumulated in the type of the reduction
        parameter.unsharded_accumulated_grad = gradient


def _rows(group: Any, names: Mapping[int, str], numel: int) -> list[Rows]:
    """torch's order: every parameter with a gradient, its rows dealt out evenly, padded to the same number."""
    shards, index = group.mesh_info.shard_mesh_size, group.mesh_info.shard_mesh_rank
    rows: list[Rows] = []
    offset = 0
    for parameter in group.fsdp_params:
        if not parameter.sharded_param.requires_grad:
            continue
        shape = parameter.sharded_param.shape
        most = -(-shape[0] // shards)
        start = min(index * most, shape[0])
        count = min(most, shape[0] - start)
        rows.append({"name": name_of(parameter, names), "offset": offset, "start": start, "count": count})
        offset += most * shape[1:].numel()
    return rows if offset == numel else []


def mean_factor(dtype: torch.dtype, shards: int, replicas: int) -> float:
    """What gradients that torch reduced over the shards are to be multiplied by to be the mean over them.

    It averages those of float32 and bfloat16. Others it divides by about the square root of the number of ranks,
    adds up, and divides by the rest when they were added up over the replicas too.
    """
    if dtype in (torch.float32, torch.bfloat16):
        return 1.0
    ranks, divided_before = shards * replicas, 1
    while ranks % divided_before == 0 and ranks / divided_before > divided_before:
        divided_before *= 2
    return divided_before / shards
