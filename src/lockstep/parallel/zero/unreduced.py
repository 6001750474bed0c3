"""Gradients of sharded models on their way: not averaged over the ranks yet, or over some of them only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypedDict

import torch

from lockstep.errors import CheckpointError
from lockstep.parallel.gradient_mean import is_negative_zero
from lockstep.parallel.zero.sharding import Sharding, name_of_shard
from lockstep.torch_internals import fsdp2
from lockstep.torch_internals.fsdp2_gathered import FSDPParam, FSDPParamGroup


class UnreducedRows(TypedDict):
    """Where ``count`` rows of a parameter, from row ``start``, begin in a flat tensor.

    ``used``: a rank of its replica has computed a gradient of it; without one on any rank there are zeros.
    """

    name: str
    offset: int
    start: int
    count: int
    used: bool


class PartialSum(TypedDict):
    """One group's gradients, reduced over the shards of one replica and not over the ``replicas``.

    ``sum`` is flat; times ``factor`` it is the mean over the shards. ``rows`` says whose they are; empty where
    only some of the group's parameters have gradients: torch does not say which.
    """

    sum: torch.Tensor
    rows: list[UnreducedRows]
    factor: float
    replicas: int


def take_unreduced(
    sharding: Sharding,
    names: Mapping[int, str],
    local: dict[str, object],
    partial: dict[str, PartialSum],
) -> None:
    """Put what was not reduced to shards of all ranks into ``local`` (by name) and ``partial`` (by a group's first)."""
    for group in sharding.parameter_groups():
        for parameter in fsdp2.params(group):
            found = [gradient.detach() for gradient in fsdp2.unreduced_grads(parameter)]
            if found:
                local[name_of_shard(parameter, names)] = found[0] if len(found) == 1 else found[0] + found[1]
        output = fsdp2.partial_reduce_output(group)
        if output is not None:
            mesh = fsdp2.mesh_of(group)
            partial[name_of_shard(fsdp2.params(group)[0], names)] = {
                "sum": output.detach(),
                "rows": _rows(group, names),
                "factor": mean_factor(output.dtype, mesh.shards, mesh.replicas),
                "replicas": mesh.replicas,
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
        for group in fsdp2.param_groups(module):
            named = {name_of_shard(parameter, names): parameter for parameter in fsdp2.params(group)}
            given = partial.get(next(iter(named)))
            if given is not None:
                _put_partial(group, named, given)
            if named.keys() & set(anywhere):
                # torch makes the tensors that have these gradients when it gathers.
                module.unshard()
                for name, parameter in named.items():
                    if name in local:
                        fsdp2.set_unreduced_grad(parameter, local[name])
                module.reshard()


def is_used(row: UnreducedRows) -> bool:
    """Return whether the rank that saved it had a gradient. Older checkpoints have rows of such parameters only."""
    return row.get("used", True)


def check_partial(partial: Mapping[str, PartialSum]) -> None:
    """Raise CheckpointError unless all rows can be told apart, as another world needs."""
    for first, group in partial.items():
        if not group["rows"]:
            raise CheckpointError(
                "The checkpoint was saved inside an accumulation window of replicated shards, and some "
                f"parameters in the group of '{first}' had no gradient then. Load it with the same number of "
                "ranks and the same 'parallel', or load a checkpoint from the end of a window."
            )


def _put_partial(group: FSDPParamGroup, named: Mapping[str, FSDPParam], given: PartialSum) -> None:
    # Without rows, torch's own order of all that are trained is the only one that fits.
    of = [named[row["name"]] for row in given["rows"]] or [
        parameter for parameter in named.values() if fsdp2.sharded_param(parameter).requires_grad
    ]
    rows = fsdp2.packed(of)
    if fsdp2.numel_of(rows) != given["sum"].numel() and fsdp2.needs_layout(group):
        raise CheckpointError(
            "The checkpoint was saved inside an accumulation window with a torch before 2.15, which does not "
            f"store which parameters in the group of '{next(iter(named))}' had no gradient. Load it with that "
            "torch, or load a checkpoint from the end of a window."
        )
    total = given["sum"].clone()
    for row, saved in zip(rows, given["rows"], strict=bool(given["rows"])):
        if not is_used(saved):
            total[row.offset : row.offset + row.numel] = -0.0
    fsdp2.set_partial_reduce_output(group, total, rows)


def _rows(group: FSDPParamGroup, names: Mapping[int, str]) -> list[UnreducedRows]:
    """Of every parameter in the sum, its rows dealt out evenly over the shards, padded to the same number."""
    mesh = fsdp2.mesh_of(group)
    sums = fsdp2.partial_reduce_output(group)
    assert sums is not None
    rows: list[UnreducedRows] = []
    for parameter, offset, numel in fsdp2.partial_reduce_rows(group):
        shape = fsdp2.sharded_param(parameter).shape
        # As fully_shard cuts: ceil(rows / shards) each, the last shards fewer or none; in the flat sum all are padded.
        most = -(-shape[0] // mesh.shards)
        if most * shape[1:].numel() != numel:
            # It is cut in another way as well, as by tensor parallelism.
            return []
        start = min(mesh.own_shard * most, shape[0])
        count = min(most, shape[0] - start)
        # Without the padding behind its last row, which is 0.0.
        own = sums[offset : offset + count * shape[1:].numel()]
        name, used = name_of_shard(parameter, names), not bool(is_negative_zero(own))
        rows.append({"name": name, "offset": offset, "start": start, "count": count, "used": used})
    return rows


def mean_factor(dtype: torch.dtype, shards: int, replicas: int) -> float:
    """Return what gradients that torch reduced over the shards are to be multiplied by to be the mean over them.

    It averages those of float32 and bfloat16. Others it divides by about the square root of the number of ranks,
    adds up, and divides by the rest when they were added up over the replicas too.
    """
    if dtype in (torch.float32, torch.bfloat16):
        return 1.0
    # As FSDP2 finds its factor: the first power of two that no longer divides, or is at least the root of the ranks.
    ranks, divided_before = shards * replicas, 1
    while ranks % divided_before == 0 and ranks / divided_before > divided_before:
        # divided before * divided after = ranks, both powers near the root, so that fp16 neither over- nor underflows.
        divided_before *= 2
    return divided_before / shards
