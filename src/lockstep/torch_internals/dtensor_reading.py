"""One number read from a DTensor: ``item()``, ``float()``, ``bool()``, comparisons in an ``if``."""

from __future__ import annotations

from typing import Any

import torch


def read_whole_numbers() -> None:
    """Let a DTensor of one number give the whole one on every rank, in this process from now on.

    torch gives each rank its own part: of ``parameter.grad.norm()`` the norm of its own shard. Collective wherever a
    number is read from a DTensor that is not replicated.

    Relies on: ``DTensor._op_dispatcher._custom_op_handlers``, asked first by torch, with (op, args, kwargs).
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _whole_number


def _whole_number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from torch.distributed.tensor import Replicate

    tensor = args[0]
    if not all(placement.is_replicate() for placement in tensor.placements):
        tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return tensor.to_local().item()
