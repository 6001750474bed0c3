"""Lets an optimizer step on whole parameters: its class becomes a subclass whose methods gather before they run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.errors import UsageError
from lockstep.model.changes import identity_of
from lockstep.torch_internals import optim as torch_optim
from lockstep.train.whole.kinds import methods_with_parameters, place_of
from lockstep.train.whole.step import WholeStep


def step_on_whole(
    optimizer: Optimizer,
    originals: Mapping[int, nn.Parameter],
    before_gathering: Callable[[], None],
) -> None:
    """Let the methods of ``optimizer`` that touch parameters run on whole ones; a second time, on those of now.

    The optimizer stays the object it is; its class becomes a subclass of the same name.

    Args:
        originals: By ``id`` of a sharded parameter: the one in whose place it came.
        before_gathering: Called before each step.
    """
    torch_optim.probe()
    whole = whole_step_of(optimizer)
    if whole is None:
        whole = WholeStep(optimizer, before_gathering)
        optimizer.__class__ = _whole_class(type(optimizer))
        vars(optimizer)["_whole_step"] = whole
    whole.add(originals)


def whole_step_of(optimizer: Optimizer) -> WholeStep | None:
    """Return the ``WholeStep`` of an optimizer that has one."""
    found = vars(optimizer).get("_whole_step")
    return found if isinstance(found, WholeStep) else None


def on_shards(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Let an optimizer that steps on whole parameters hold shards again inside, for hooks of a step. Collective
    there."""
    whole = whole_step_of(optimizer)
    return whole.suspended() if whole is not None and whole.runs else nullcontext()


def _whole_class(cls: type[Optimizer]) -> type[Optimizer]:
    names = {**identity_of(cls), "step": _step_of(cls)}
    for name in methods_with_parameters(cls):
        names.setdefault(name, _method_of(cls, name))
    return type(cls.__name__, (cls,), names)


def _step_of(cls: type[Optimizer]) -> object:
    function: Any = cls.step

    @functools.wraps(function)
    def step(self: Optimizer, *args: object, **kwargs: object) -> object:
        return _required(self).step(False, cls, *args, **kwargs)

    def unhooked(self: Optimizer, *args: object, **kwargs: object) -> object:
        return _required(self).step(True, cls, *args, **kwargs)

    # Hooks are the class's own, inside.
    torch_optim.take_for_wrapped(step)
    step.__wrapped__ = unhooked
    return step


def _method_of(cls: type[Optimizer], name: str) -> object:
    function = getattr(cls, name)

    @functools.wraps(function)
    def method(self: Optimizer, *args: object, **kwargs: object) -> object:
        return _required(self).run(function.__get__(self), *args, **kwargs)

    return method


def _required(optimizer: Optimizer) -> WholeStep:
    whole = whole_step_of(optimizer)
    if whole is None:
        raise UsageError(
            f"This {type(optimizer).__name__} is a copy of one that steps on whole parameters "
            f"({place_of(optimizer)}). Make a new optimizer from the parameters of the model, and pass it to "
            "prepare()."
        )
    return whole
