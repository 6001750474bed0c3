"""DTensor and device meshes. Imports them at first use only: that takes most of a second."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from lockstep.torch_internals.versions import expect, probed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard


LOG_SOFTMAX = torch.ops.aten._log_softmax.default
"""Relies on: (input, dim, half_to_float)."""
LOG_SOFTMAX_BACKWARD = torch.ops.aten._log_softmax_backward_data.default
"""Relies on: (gradient, output, dim, input_dtype)."""


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, without a graph. Relies on: ``_local_tensor``; what ``to_local`` wraps."""
    part: torch.Tensor = tensor._local_tensor
    return part


def strided_shard(dim: int, pieces: int) -> _StridedShard:
    """Return a placement that cuts a dimension into pieces first, and each of these into the ranks' parts.

    Relies on: ``_StridedShard(dim, split_factor=pieces)``.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    _plan_for_pieces()
    return _StridedShard(dim, split_factor=pieces)


@functools.cache
def _plan_for_pieces() -> None:
    """Let torch 2.11 gather a shard of pieces, as later versions do: it takes each for an order of mesh axes.

    Relies on: ``_redistribute._gen_transform_infos_non_cached(source, target, use_graph)``, and there on a
    ValueError for what is no such order; ``generate_greedy_transform_infos`` of the planner, which gathers it.
    """
    planning: Any = importlib.import_module("torch.distributed.tensor._redistribute")
    # From torch 2.12 on the planner handles such a shard itself.
    if hasattr(planning, "_StridedShardNotDecodableError"):
        return
    by_order = planning._gen_transform_infos_non_cached

    def plan(source: Any, target: object, use_graph: bool | None = None) -> Any:
        try:
            return by_order(source, target, use_graph)
        except ValueError:
            planner = planning.get_redistribute_planner(source.device_mesh, source.tensor_meta)
            return planner.generate_greedy_transform_infos(source, target)

    planning._gen_transform_infos_non_cached = plan


def handle_operators(handlers: Mapping[OpOverload, Callable[..., object]]) -> None:
    """Let DTensor call ``handler(operator, args, kwargs)`` for these operators, from now on.

    Relies on: ``DTensor._op_dispatcher._custom_op_handlers``, which torch's ``loss_parallel`` fills and empties.
    """
    from torch.distributed.tensor import DTensor

    DTensor._op_dispatcher._custom_op_handlers.update(handlers)


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Flatten the mesh's axes to one, in row-major order; the axis can be used in slices of the whole mesh.

    Relies on: ``_flatten(name)``. Collective the first time.
    """
    return mesh._flatten(name)


def forget_meshes() -> None:
    """Empty what DTensor remembers: a mesh of the next process group would be taken for an equal one of this group.

    Relies on: ``debug._clear_sharding_prop_cache``; versions without it do not remember in a way that goes wrong.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


@probed("DTensor", "lays out and dispatches tensors")
def probe() -> None:
    """Look at the placement and the dispatcher; no mesh is made, which would need a process group."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    strided = strided_shard(1, 3)
    expect(strided.split_factor == 3 and strided != Shard(1), "a shard of pieces")
    handlers = DTensor._op_dispatcher._custom_op_handlers
    expect(all(isinstance(operator, torch._ops.OpOverload) for operator in handlers), "handlers of operators")
    for operator, arguments in (
        (LOG_SOFTMAX, ["self", "dim", "half_to_float"]),
        (LOG_SOFTMAX_BACKWARD, ["grad_output", "output", "dim", "input_dtype"]),
    ):
        expect([one.name for one in operator._schema.arguments] == arguments, f"the arguments of {operator}")
    expect(callable(DeviceMesh._flatten), "meshes of one axis")
