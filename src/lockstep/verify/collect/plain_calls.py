"""Calls of torch that a script makes beside its ``Accelerator``: seen, and put right for a process of several ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.verify.collect.batch_position import BatchPosition


class BackwardObserver(Protocol):
    """Is told of each backward."""

    place: BatchPosition

    def plain_backward(self, loss: Tensor) -> float | None:
        """Return by what a ``loss``, of any shape, is to be multiplied; None: ``Accelerator`` has done it."""


def observe_backward(observer: BackwardObserver) -> Callable[[], None]:
    """Tell of each ``Tensor.backward``; divide it where it is one rank's of several. Returns what ends this."""
    original = Tensor.backward

    def backward(self: Tensor, gradient: Tensor | None = None, *args: object, **kwargs: object) -> object:
        factor = observer.plain_backward(self)
        if factor is not None and factor != 1:
            gradient = torch.full_like(self, factor) if gradient is None else gradient * factor
        return original(self, gradient, *args, **kwargs)

    def end() -> None:
        Tensor.backward = original  # type: ignore[method-assign]

    Tensor.backward = backward  # type: ignore[method-assign]
    return end


def keep_gradients(module: nn.Module, place: BatchPosition) -> None:
    """Let ``module.zero_grad`` wait where gradients of some ranks wait for those of others."""
    original = module.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        if place.clears():
            original(set_to_none)

    module.zero_grad = zero_grad  # type: ignore[method-assign]


def step_schedulers_when(times: Callable[[str], int]) -> Callable[[], None]:
    """Have schedulers step so many ``times`` whenever they are asked to, until what is returned is called.

    ``times`` is told the module that asks.
    """
    kinds = {LRScheduler, ReduceLROnPlateau, *_kinds_of(LRScheduler)}
    steps = {kind: vars(kind)["step"] for kind in kinds if "step" in vars(kind)}
    for kind, step in steps.items():
        setattr(kind, "step", _repeated(times, step))  # noqa: B010  # mypy refuses methods

    def restore() -> None:
        for kind, step in steps.items():
            setattr(kind, "step", step)  # noqa: B010

    return restore


def _kinds_of(kind: type) -> Iterator[type]:
    other: type
    for other in type.__subclasses__(kind):
        yield other
        yield from _kinds_of(other)


def _repeated(times: Callable[[str], int], step: Callable[..., object]) -> Callable[..., object]:
    @wraps(step)
    def repeated(scheduler: LRScheduler, *args: object, **kwargs: object) -> None:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        number = times(caller)
        # OneCycleLR refuses to go on after its steps; Accelerate leaves out the rest, too.
        total = getattr(scheduler, "total_steps", None)
        for _ in range(number):
            if number > 1 and total is not None and scheduler.last_epoch >= total:
                return
            step(scheduler, *args, **kwargs)

    return repeated
