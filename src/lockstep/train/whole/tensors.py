"""Whole tensors in the place of sharded ones: gathered before a step, cut again after it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.comm.dtensor import full, is_dtensor, local, regions_of, shard_like
from lockstep.comm.tree import StateDict
from lockstep.errors import UsageError
from lockstep.torch_internals.replaced_parameters import revive
from lockstep.torch_internals.tensors import storage_key, version


class WholeParameter:
    """The whole of one sharded parameter, while its optimizer steps; in between it is empty.

    Args:
        sharded: A DTensor.
        original: The parameter in whose place ``sharded`` came, to which an optimizer may hold references.
    """

    def __init__(self, sharded: torch.Tensor, original: nn.Parameter | None) -> None:
        self.sharded = sharded
        device = torch.device(sharded.device_mesh.device_type)  # type: ignore[attr-defined]
        # The original is used again if it can be, because hooks, groups and attributes of the optimizer may refer to
        # it.
        is_alike = (
            original is not None
            and original.dtype == sharded.dtype
            and original.device.type == device.type
            and not is_dtensor(original)
        )
        self.whole: nn.Parameter = (
            original  # type: ignore[assignment]
            if is_alike
            else nn.Parameter(torch.empty(0, dtype=sharded.dtype, device=device), sharded.requires_grad)
        )
        revive(self.whole)
        if not is_alike:
            self.whole.__dict__.update(sharded.__dict__)
        # Of the whole as it was gathered: an optimizer may set ``p.data`` to memory of its state.
        self.memory = 0
        # The gathered gradient, and its version then: a later one was written to.
        self._gradient: tuple[torch.Tensor | None, int] = (None, 0)

    def gather(self, has_gradient: bool) -> None:
        """Have the values and the gradient of now. Collective.

        ``has_gradient``: On any rank; one of those that lack it may have no rows of this parameter.
        """
        whole, sharded = self.whole, self.sharded
        values = gathered(sharded.detach())
        # After a closure in place: the optimizer may hold views of its memory.
        if whole.shape == values.shape:
            whole.data.copy_(values)
        else:
            whole.data = values
        self.memory = storage_key(whole)
        whole.requires_grad_(sharded.requires_grad)
        gradient = None
        if has_gradient:
            given = torch.zeros_like(sharded) if sharded.grad is None else sharded.grad
            gradient = gathered(given.detach())
            if gradient.dtype != whole.dtype and hasattr(whole, "grad_dtype"):
                whole.grad_dtype = gradient.dtype
        whole.grad = gradient
        self._gradient = gradient, 0 if gradient is None else version(gradient)

    def write_back(self) -> None:
        """Let this rank's shard, and that of the gradient, be what the whole is now."""
        sharded, whole = self.sharded, self.whole
        if whole.shape != sharded.shape:
            raise UsageError(
                f"An optimizer changed the shape of a parameter from {tuple(sharded.shape)} to "
                f"{tuple(whole.shape)}, but the shape of a sharded parameter cannot change. Leave the shapes of "
                "parameters as they are, or use parallel='ddp'."
            )
        _copy_part(whole.detach(), sharded.detach())
        gradient = whole.grad
        if gradient is None:
            sharded.grad = None
        elif sharded.grad is None:
            sharded.grad = shard_like(gradient, sharded)
        # A gradient that the step has not touched need not be cut again.
        elif self._gradient[0] is not gradient or self._gradient[1] != version(gradient):
            _copy_part(gradient, sharded.grad)

    def release(self) -> None:
        """Be empty again."""
        self.whole.grad = None
        self._gradient = None, 0
        self.whole.data = self.whole.new_empty(0)


def gathered(sharded: torch.Tensor) -> torch.Tensor:
    """Return the whole of a DTensor, of its global shape, in memory of its own. Collective."""
    every, part = full(sharded), local(sharded)
    is_shared = storage_key(every) == storage_key(part)
    return every.clone() if is_shared else every


def _copy_part(whole: torch.Tensor, sharded: torch.Tensor) -> None:
    part = local(sharded)
    for region in regions_of(sharded):
        region.local_view(part).copy_(region.whole_view(whole))


def gather_state(values: dict[object, object]) -> None:
    """Let the state of one parameter hold whole tensors. Collective."""
    # In one order on all ranks: each may have made its state in another.
    for name in sorted(values, key=str):
        value = values[name]
        if is_dtensor(value):
            values[name] = gathered(value.detach())


def cut_state(parameter: WholeParameter, values: dict[object, Any]) -> None:
    """Let the state of one parameter be sharded as that is, where a tensor has its shape.

    What the optimizer holds elsewhere too stays whole.
    """
    for name in list(values):
        value = values[name]
        if not isinstance(value, torch.Tensor) or is_dtensor(value) or value.layout is not torch.strided:
            continue
        if value.numel() and value is not parameter.whole and storage_key(value) == parameter.memory:
            raise UsageError(
                f"An optimizer keeps a view of a parameter of shape {tuple(parameter.sharded.shape)} as its state "
                f"'{name}', which could not follow a sharded parameter. Keep a clone(), or use parallel='ddp'."
            )
        is_alike = value.ndim > 0 and value.shape == parameter.sharded.shape
        # These names would count as references.
        del value
        if is_alike and _references(values, name) <= _LEAST_REFERENCES:
            values[name] = shard_like(values[name].detach(), parameter.sharded)


def _references(values: Mapping[object, object], name: object) -> int:
    value = values[name]
    return sys.getrefcount(value)


# What counting itself adds: a tensor that nobody else holds has as many.
_LEAST_REFERENCES = _references({"": torch.empty(0)}, "")


def tensors_of(groups: Iterable[StateDict]) -> Iterator[torch.Tensor]:
    """Return the parameters of an optimizer's groups."""
    return (parameter for group in groups for parameter in group["params"])
