"""What has been done to a model that cannot be right once it is spread: hooks on its parameters, other parameters."""

from __future__ import annotations

import functools
from typing import NoReturn
from weakref import WeakSet

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lockstep.errors import UsageError
from lockstep.torch_internals.tensors import kind_of_hook


def refuse_hooks(model: nn.Module, parallel: object, world_size: int) -> None:
    """Raise UsageError if a parameter has a hook on any rank: its place is taken by one that has gradients in parts.

    A hook would see one rank's own gradient, or its part of the mean, where in plain torch it sees the whole.
    Collective.
    """
    mine = ((name, kind_of_hook(parameter)) for name, parameter in model.named_parameters())
    first = next(((name, kind) for name, kind in mine if kind is not None), None)
    of_ranks: list[tuple[str, str] | None] = [None] * world_size
    dist.all_gather_object(of_ranks, first)
    for name, kind in filter(None, of_ranks):
        raise hooked(type(model).__name__, name, kind, parallel)


def hooked(model: str, name: str, kind: str, parallel: object) -> UsageError:
    """Return the refusal of a hook on a parameter."""
    return UsageError(
        f"'{name}' of {model} has a hook by {kind}, which parallel='{parallel}' cannot keep: each rank has only "
        "a part of the gradient, but the hook needs the whole. Change gradients between accelerator.backward() "
        "and optimizer.step(), use a hook of a module (register_full_backward_hook), or use parallel='ddp'."
    )


_SHARDED: WeakSet[nn.Module] = WeakSet()
"""All modules of sharded models."""


def refuse_other_parameters(model: nn.Module) -> None:
    """Refuse, from now on, that a script sets a parameter, or a module with others, in ``model``: UsageError."""
    _watch_registrations()
    _SHARDED.update(model.modules())


@functools.cache
def _watch_registrations() -> None:
    register_module_parameter_registration_hook(_parameter_is_set)
    register_module_module_registration_hook(_module_is_set)


def _parameter_is_set(module: nn.Module, name: str, parameter: object) -> None:
    # torch sets shards and whole parameters past this, unless a module has a ``__setattr__`` of its own.
    is_torchs = type(module).__setattr__ is not nn.Module.__setattr__
    if module in _SHARDED and parameter is not None and not is_torchs:
        _refuse(module, name)


def _module_is_set(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if module in _SHARDED and submodule is not None and any(map(_is_other, submodule.modules())):
        _refuse(module, name)


def _is_other(module: nn.Module) -> bool:
    return module not in _SHARDED and next(module.parameters(recurse=False), None) is not None


def _refuse(module: nn.Module, name: str) -> NoReturn:
    raise UsageError(
        f"'{name}' of {type(module).__name__.removeprefix('FSDP')} was set to another parameter or module after the "
        "model was prepared. ZeRO trains only the parameters that a model has in accelerator.prepare(). Change the "
        "model before prepare, or use parallel='ddp'."
    )
