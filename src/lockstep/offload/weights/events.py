"""When a model's units are used: hooks on their modules, told to listeners."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from lockstep.comm.tree import leaves
from lockstep.offload.weights.groups import WeightGroup


class UnitListener(Protocol):
    """What is told of a unit's use, in the thread that computes.

    Begins and ends are nested as modules are, and a unit of several modules may begin while it is in use.
    An exception in ``forward_begins`` or ``backward_begins`` ends the forward or backward pass.
    """

    def forward_begins(self, unit: WeightGroup) -> None: ...

    def forward_ended(self, unit: WeightGroup) -> None:
        """Also after an exception in the forward pass, even if it was raised before ``forward_begins``."""

    def backward_begins(self, unit: WeightGroup) -> None:
        """Gradients of the unit's outputs are known; once for each forward in each backward."""


class RemovableHandles:
    """Hooks that are removed together."""

    def __init__(self, handles: Iterable[RemovableHandle]) -> None:
        self._handles = list(handles)

    def add(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def __reduce__(self) -> tuple[Any, ...]:
        return RemovableHandles, ((),)  # a copy of the model has no such hooks


def listen(
    model: nn.Module, units: Sequence[WeightGroup], listeners: Sequence[UnitListener]
) -> RemovableHandles:
    """Tell ``listeners``, in their order, when the forward or backward of a unit begins or has ended.

    The hooks run before and after all others, are not compiled by torch.compile, and a copy of the model
    (deepcopy, pickle) has none that do anything.
    """
    handles = []
    for unit in units:
        begin, end = _Begin(unit, tuple(listeners)), _End(unit, tuple(listeners))
        for module in unit.modules:
            handles.append(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(end, with_kwargs=True, always_call=True))
    return RemovableHandles(handles)


class StreamingHook:
    """A forward hook, or forward pre-hook, that is not compiled and does nothing in a copy of its model.

    Subclasses have ``run``, which takes what torch calls the hook with.
    """

    def __init__(self) -> None:
        self._run = _uncompiled()

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert_hook, ()

    def __call__(self, *args: object) -> None:
        self._run(self, *args)

    def run(self, *args: object) -> None:
        raise NotImplementedError


@functools.cache
def _uncompiled() -> Callable[..., None]:
    # Not of the bound method: a hook that refers to itself would keep the weights until garbage is collected.
    return torch.compiler.disable(lambda hook, *args: hook.run(*args))


def _inert(*args: object) -> None:
    pass


def _inert_hook() -> object:
    return _inert


class _UnitHook(StreamingHook):
    def __init__(self, unit: WeightGroup, listeners: tuple[UnitListener, ...]) -> None:
        super().__init__()
        self._unit = unit
        self._listeners = listeners


class _Begin(_UnitHook):
    def run(self, *args: object) -> None:
        for listener in self._listeners:
            listener.forward_begins(self._unit)


class _End(_UnitHook):
    def run(self, *args: object) -> None:
        for listener in self._listeners:
            listener.forward_ended(self._unit)
        if torch.is_grad_enabled():
            outputs = [leaf for leaf in leaves(args[-1]).values() if isinstance(leaf, torch.Tensor)]
            outputs = [output for output in outputs if output.requires_grad]
            if outputs:
                register_multi_grad_hook(outputs, self._backward, mode="any")

    def _backward(self, gradient: torch.Tensor) -> None:
        for listener in self._listeners:
            listener.backward_begins(self._unit)
