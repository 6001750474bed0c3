"""Optimizers that say of themselves that they treat every element by itself: they step on parts, and are checked."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.comm.dtensor import is_dtensor
from lockstep.comm.tree import map_tensors
from lockstep.errors import UsageError
from lockstep.torch_internals import dispatch
from lockstep.torch_internals.dispatch import operation_name
from lockstep.train.whole.source import line_of_step, methods_with_parameters

_ALLOWED = {
    *(
        "copy_",
        "clone",
        "detach",
        "alias",
        "fill_",
        "zero_",
        *dispatch.CONVERSIONS,
        "lift_fresh",
        "is_same_size",
    ),
    *("empty_like", "zeros_like", "ones_like", "full_like", "new_zeros", "new_empty", "new_ones", "new_full"),
}
"""What gives each element by itself, besides the operations that torch marks as pointwise."""


def declares_elementwise(optimizer: Optimizer) -> bool:
    """Whether the class has ``elementwise = True``."""
    return getattr(type(optimizer), "elementwise", False) is True


def check_elementwise(optimizer: Optimizer) -> None:
    """From now on raise UsageError where a method of ``optimizer`` does more than element by element.

    It costs about 10 µs for each operation. The optimizer stays the object it is; its class becomes a subclass.
    """
    if not getattr(type(optimizer), "_is_checked_elementwise", False):
        own_step = vars(optimizer).pop("step", None)  # a scheduler's note, or one in the place of the class's
        cls: Any = type(optimizer)
        names: dict[str, Any] = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "_is_checked_elementwise": True,
        }
        for name in ("step", *methods_with_parameters(cls)):
            names[name] = _checked(getattr(cls, name))
        optimizer.__class__ = type(cls.__name__, (cls,), names)
        if own_step is not None:
            vars(optimizer)["step"] = _checked(own_step, optimizer)


def _checked(function: Any, optimizer: Optimizer | None = None) -> object:
    @functools.wraps(function)
    def method(*args: object, **kwargs: object) -> object:
        this: Any = optimizer if optimizer is not None else args[0]
        if any(map(callable, (*args[1:], *kwargs.values()))):
            raise UsageError(
                f"{type(this).__name__} says elementwise=True, but its step got a closure, in which a model runs. Call "
                "it without one, or leave elementwise out: the step then gets whole parameters."
            )
        with _Elementwise(this):
            return function(*args, **kwargs)

    return method


class _Elementwise(dispatch.TorchDispatchMode):
    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self._optimizer = optimizer

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_elementwise(func) and (_draws(func) or _has_elements((args, kwargs))):
            optimizer = self._optimizer
            raise UsageError(
                f"{type(optimizer).__name__} says elementwise=True, but {func} ({line_of_step(optimizer)}) does more "
                "than element by element, and each rank has a part of the elements. Leave elementwise out: the step "
                "then gets whole parameters where it can, and is refused where not."
            )
        return func(*args, **kwargs)


def _is_elementwise(func: Any) -> bool:
    name = operation_name(func)
    if name.startswith("_foreach_"):
        return name not in dispatch.COMBINING_LISTS
    return (
        name in _ALLOWED
        or name.startswith("_fused_")
        or (torch.Tag.pointwise in func.tags and not _draws(func))
    )


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _has_elements(tree: object) -> bool:
    """Whether there is a tensor that a rank may have a part of."""
    found = []
    map_tensors(lambda tensor: found.append(is_dtensor(tensor) or tensor.numel() > 1), tree)
    return any(found)
