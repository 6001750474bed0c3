"""Tensors of which each rank holds a part: torch's DTensor.

Nothing here imports ``torch.distributed.tensor`` before there is such a tensor: that takes most of a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.tree import map_tensors


def is_dtensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


@torch.no_grad()
def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, sharing its memory; other tensors are returned as they are."""
    part: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return part


@torch.no_grad()
def whole(tree: Any, keep: bool = True) -> Any:
    """Nested values with every DTensor gathered, in host memory; collective.

    One tensor at a time is on the device, also of those whose shards are in host memory. Tensors that share memory
    do so afterwards. Ranks that don't ``keep`` get None in place of each.
    """
    gathered: dict[Any, torch.Tensor | None] = {}

    def gather(tensor: torch.Tensor) -> torch.Tensor | None:
        if not is_dtensor(tensor):
            return tensor
        place = _place(tensor)
        if place not in gathered:
            sharded: Any = tensor
            full = sharded.to(sharded.device_mesh.device_type).full_tensor()
            gathered[place] = full.cpu() if keep else None
        return gathered[place]

    return map_tensors(gather, tree)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that share memory. All ranks agree on which, also where a shard is empty."""
    part = local(tensor)
    return part.untyped_storage()._cdata, part.storage_offset(), tensor.shape, part.dtype


@torch.no_grad()
def shard_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``tensor``, of which every rank has the whole, as a DTensor laid out as ``like``.

    Other dtypes and devices than those of ``like`` are kept on that device and in that dtype of ``tensor``.
    """
    if not is_dtensor(like) or is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    device = local(like).device
    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    placements: Any = like.placements  # type: ignore[attr-defined]
    sharded: Any = distribute_tensor(
        tensor.detach().to(mesh.device_type), mesh, placements, src_data_rank=None
    )
    return sharded if local(sharded).device == device else sharded.to(device)


@torch.no_grad()
def total_norm(tensors: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all elements of all tensors as if they were one vector, 0-d and the same on all ranks.

    Collective where there are DTensors: one all-reduce for each mesh dimension over which they are sharded.
    """
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        layout = (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None  # type: ignore[attr-defined]
        groups.setdefault(layout, []).append(local(tensor))
    norms = []
    for layout, parts in groups.items():
        # A rank may have no rows of any of them, and no elements have no largest one.
        elements = [part for part in parts if part.numel()] or [parts[0].new_zeros(())]
        norm = torch.nn.utils.get_total_norm(elements, norm_type)
        norms.append(norm if layout is None else _norm_over_shards(norm, norm_type, *layout))
    if not norms:
        return torch.tensor(0.0)
    device = norms[0].device
    return (
        norms[0]
        if len(norms) == 1
        else torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
    )


def _norm_over_shards(norm: torch.Tensor, norm_type: float, mesh: Any, placements: Any) -> torch.Tensor:
    if norm_type == float("inf"):
        return _over_shards(norm, dist.ReduceOp.MAX, mesh, placements)
    power = norm.to(torch.promote_types(norm.dtype, torch.float32)) ** norm_type  # of fp16 it would overflow
    total = _over_shards(power, dist.ReduceOp.SUM, mesh, placements)
    return (total ** (1 / norm_type)).to(norm.dtype)


@torch.no_grad()
def max_over_shards(number: torch.Tensor, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The largest ``number`` (0-d) of the ranks among which the DTensors in ``tensors`` are sharded. Collective."""
    layouts = {(tensor.device_mesh, tensor.placements): None for tensor in tensors if is_dtensor(tensor)}  # type: ignore[attr-defined]
    for mesh, placements in layouts:
        number = _over_shards(number, dist.ReduceOp.MAX, mesh, placements)
    return number


def _over_shards(number: torch.Tensor, op: Any, mesh: Any, placements: Any) -> torch.Tensor:
    # Shards may be in host memory, where the group cannot reduce.
    reduced = number.to(mesh.device_type, copy=True)
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            dist.all_reduce(reduced, op, mesh.get_group(dim))
    return reduced.to(number.device)
