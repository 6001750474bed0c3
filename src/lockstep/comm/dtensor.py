"""Tensors of which each rank holds a part: torch's DTensor.

Nothing here imports ``torch.distributed.tensor`` before there is such a tensor: that takes most of a second.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist

from lockstep.comm.collectives import as_bytes
from lockstep.comm.exchange import all_gather_into_tensor
from lockstep.comm.layout import (
    ShardRegion,
    dim_of,
    is_partial,
    is_plain,
    local_regions,
    local_shape,
    whole_region,
)
from lockstep.comm.tree import map_tensors
from lockstep.errors import UsageError
from lockstep.torch_internals import tensors as torch_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether ``tensor`` is a DTensor."""
    # Asking the object itself would compute both.
    kind = type(tensor)
    return hasattr(kind, "placements") and hasattr(kind, "device_mesh")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor of any shape, sharing its memory; other tensors as they are."""
    if not is_dtensor(tensor):
        return tensor
    if torch.is_grad_enabled():
        with torch.no_grad():
            return tensor.to_local()
    return tensor.to_local()


@torch.no_grad()
def whole(tree: object, keep: bool = True) -> Any:
    """Nested values with every DTensor gathered, in host memory; collective.

    One tensor at a time is on the device, also of those whose shards are in host memory. Tensors that share memory
    do so afterwards. Ranks that don't ``keep`` get None in place of each.
    """
    gathered: dict[object, torch.Tensor | None] = {}

    def gather(tensor: torch.Tensor) -> torch.Tensor | None:
        if not is_dtensor(tensor):
            return tensor
        place = _memory_key(tensor)
        if place not in gathered:
            every = full(tensor)
            gathered[place] = every.cpu() if keep else None
        return gathered[place]

    return map_tensors(gather, tree)


def _memory_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that share memory. All ranks agree on which, also where a shard is empty."""
    part = local(tensor)
    return torch_tensors.storage_key(part), part.storage_offset(), tensor.shape, part.dtype


@torch.no_grad()
def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a DTensor, on the device of its mesh; collective. It may share memory with this rank's part."""
    assert is_dtensor(tensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    tensor = tensor.to(mesh.device_type)
    if is_plain(placements):
        return cast("DTensor", tensor).full_tensor()
    return _gathered(local(tensor), tensor.shape, mesh, placements)


def _gathered(
    part: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[object]
) -> torch.Tensor:
    """Return the tensor of which each rank has ``part``. torch's ``full_tensor`` mixes up some that fully_shard cut."""
    cut = [axis for axis, placement in enumerate(placements) if dim_of(placement) is not None]
    coordinates = []
    for chosen in product(*(range(mesh.shape[axis]) for axis in cut)):
        coordinate = list(mesh.get_coordinate() or ())
        for axis, index in zip(cut, chosen, strict=True):
            coordinate[axis] = index
        coordinates.append(coordinate)
    shapes = [local_shape(shape, mesh.shape, placements, coordinate) for coordinate in coordinates]
    # A gather takes parts of one size: shorter ones travel with zeros behind them.
    sent = part.new_zeros(max(math.prod(one) for one in shapes))
    sent[: part.numel()] = part.reshape(-1)
    data = as_bytes(sent)
    # The last axis first: what has been gathered then lies in the order of ``coordinates``.
    for axis in reversed(cut):
        received = data.new_empty(mesh.shape[axis] * data.numel())
        if data.numel():
            all_gather_into_tensor(received, data, group=mesh.get_group(axis))
        data = received
    full = part.new_empty(tuple(shape))
    # [ranks, elements of the largest part]
    parts = data.view(part.dtype).view(len(coordinates), -1)
    for coordinate, of_rank, row in zip(coordinates, shapes, parts, strict=True):
        other = row[: math.prod(of_rank)].view(of_rank)
        for region in local_regions(shape, mesh.shape, placements, coordinate):
            region.whole_view(full).copy_(region.local_view(other))
    return full


@functools.cache
def _shown_class() -> type[torch.Tensor]:
    from torch.distributed.tensor import DTensor

    class ShownWhole(DTensor):
        """A DTensor in whose place every operation gets its ``whole_value``."""

        __slots__ = ()

        @classmethod
        def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
            def shown(value: object) -> object:
                return vars(value)["whole_value"] if type(value) is cls else value

            # Lists of tensors, as torch.cat takes them, are one level deep.
            plain = [[shown(one) for one in value] if type(value) is list else shown(value) for value in args]
            return func(*plain, **{name: shown(value) for name, value in (kwargs or {}).items()})

    return ShownWhole


@contextmanager
def shown_whole(tensors: Sequence[Any], wholes: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let these DTensors act as the plain tensors ``wholes`` inside of the block, wherever they are held."""
    kinds = [type(tensor) for tensor in tensors]
    for tensor, whole in zip(tensors, wholes, strict=True):
        tensor.whole_value = whole
        tensor.__class__ = _shown_class()
    try:
        yield
    finally:
        for tensor, kind in zip(tensors, kinds, strict=True):
            tensor.__class__ = kind
            del tensor.whole_value


def regions_of(tensor: torch.Tensor) -> list[ShardRegion]:
    """Return what this rank holds of a tensor of any shape: all of it, unless it is a DTensor; several regions if
    that is strided.

    Raises:
        UsageError: the DTensor's local part is not what its placements say, or no part but an addend.
    """
    if not is_dtensor(tensor):
        return [whole_region(tensor.shape)]
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    # This rank is not in the mesh.
    if coordinate is None:
        return []
    _refuse_partial(placements)
    expected = local_shape(tensor.shape, mesh.shape, placements, coordinate)
    if expected != tuple(local(tensor).shape):
        raise UsageError(
            f"A tensor of shape {tuple(tensor.shape)} is laid out as {placements} over a mesh of shape "
            f"{tuple(mesh.shape)}: this rank should hold a part of shape {expected}, but its part has shape "
            f"{tuple(local(tensor).shape)}. Make the tensor with distribute_tensor or fully_shard, or choose "
            "dimensions that divide evenly."
        )
    return local_regions(tensor.shape, mesh.shape, placements, coordinate)


def _refuse_partial(placements: Iterable[Placement]) -> None:
    if any(is_partial(placement) for placement in placements):
        raise UsageError(
            f"A tensor is laid out as {tuple(placements)}: each rank holds a term of a sum that is not computed "
            "yet. Redistribute it to Shard or Replicate first."
        )


@torch.no_grad()
def shard_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``tensor``, of which every rank has the whole, as a DTensor laid out as ``like``.

    Both have one shape. Other dtypes and devices than those of ``like`` are kept on that device and in that dtype of
    ``tensor``.
    """
    if not is_dtensor(like) or is_dtensor(tensor):
        return tensor
    part = torch.empty(local(like).shape, dtype=tensor.dtype, device=local(like).device)
    for region in regions_of(like):
        region.local_view(part).copy_(region.whole_view(tensor))
    return with_part(part, like)


@torch.no_grad()
def with_part(part: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return a DTensor of the shape and placements of ``like``, of which this rank has ``part``: of the shape of
    its local part, on the device and in the dtype that the result has."""
    from torch.distributed.tensor import DTensor

    spread: DTensor = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return spread if local(spread).device == part.device else spread.to(part.device)


def total_norm(
    tensors: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    norm_of: Callable[[Sequence[torch.Tensor], float], torch.Tensor] = torch.nn.utils.get_total_norm,
) -> torch.Tensor:
    """Return the norm of all elements of all tensors as if they were one vector, 0-d and the same on all ranks.

    ``norm_of`` computes it of plain tensors.

    Collective where there are DTensors: one all-reduce for each mesh dimension over which they are sharded. They may
    be on several meshes, but every rank must pass them in the same order. Copies on other ranks count once.

    Raises:
        UsageError: a DTensor is not summed up yet.
    """
    tensors = list(tensors)
    # Mostly; so asked without a call for each.
    if {*map(type, tensors)} == {torch.Tensor} and all(map(torch.Tensor.numel, tensors)):
        return norm_of(tensors, norm_type)
    return _total_norm_of_parts(tensors, norm_type, norm_of)


@torch.no_grad()
def _total_norm_of_parts(
    tensors: Iterable[torch.Tensor],
    norm_type: float,
    norm_of: Callable[[Sequence[torch.Tensor], float], torch.Tensor],
) -> torch.Tensor:
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        if not is_dtensor(tensor):
            groups.setdefault(None, []).append(tensor)
            continue
        _refuse_partial(tensor.placements)
        # Tensors that lie alike need one all-reduce together.
        groups.setdefault((tensor.device_mesh, tensor.placements), []).append(local(tensor))
    norms = []
    for layout, parts in groups.items():
        # A rank may have no rows of any of them, and no elements have no largest one.
        elements = [part for part in parts if part.numel()] or [parts[0].new_zeros(())]
        norm = norm_of(elements, norm_type)
        norms.append(norm if layout is None else _norm_over_shards(norm, norm_type, *layout))
    if not norms:
        return torch.tensor(0.0)
    device = norms[0].device
    return (
        norms[0]
        if len(norms) == 1
        else torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
    )


def _norm_over_shards(
    norm: torch.Tensor, norm_type: float, mesh: DeviceMesh, placements: Sequence[object]
) -> torch.Tensor:
    if norm_type == float("inf"):
        return _over_shards(norm, dist.ReduceOp.MAX, mesh, placements)
    # In fp16 it would overflow.
    power = norm.to(torch.promote_types(norm.dtype, torch.float32)) ** norm_type
    total = _over_shards(power, dist.ReduceOp.SUM, mesh, placements)
    return (total ** (1 / norm_type)).to(norm.dtype)


@torch.no_grad()
def max_over_shards(number: torch.Tensor, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the largest ``number`` (0-d) of the ranks over which DTensors in ``tensors`` are sharded. Collective."""
    # A dict, not a set: all ranks must reduce over the meshes in the same order.
    layouts = {(tensor.device_mesh, tensor.placements): None for tensor in tensors if is_dtensor(tensor)}
    for mesh, placements in layouts:
        number = _over_shards(number, dist.ReduceOp.MAX, mesh, placements)
    return number


def _over_shards(
    number: torch.Tensor, op: object, mesh: DeviceMesh, placements: Sequence[object]
) -> torch.Tensor:
    # Shards may be in host memory, where the group cannot reduce.
    reduced = number.to(mesh.device_type, copy=True)
    for dim, placement in enumerate(placements):
        # Strided ones, of fully_shard on tensor parallel, do not call themselves so.
        if dim_of(placement) is not None:
            dist.all_reduce(reduced, op, mesh.get_group(dim))
    return reduced.to(number.device)
