"""Gradients that a schedule computes before the loop asks for them, and those of parameters on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.errors import UsageError
from lockstep.torch_internals.autograd import FunctionContext

ParameterGradients = list[tuple[nn.Parameter, Tensor]]
OutputGradients = tuple[Tensor | None, ...]
"""Of outputs that a loop has called backward on; None where there is none."""


@contextmanager
def kept_apart(parameters: Iterable[nn.Parameter]) -> Iterator[ParameterGradients]:
    """Gradients that come inside are not added to ``.grad``; they are in the list at the end."""
    # Backward adds to ``.grad``; without one it makes a new tensor, which is then this pass's alone.
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    found: ParameterGradients = []
    try:
        yield found
    finally:
        for parameter, gradient in before:
            if parameter.grad is not None:
                found.append((parameter, _like_parameter(parameter, parameter.grad)))
            parameter.grad = gradient


def _like_parameter(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Return a gradient with the placements of its parameter: sums that are still to be made over ranks are made."""
    if not (isinstance(gradient, DTensor) and isinstance(parameter, DTensor)):
        return gradient
    # Nothing is done where they are the same.
    return gradient.redistribute(placements=parameter.placements)


class GradientAccumulator:
    """Adds gradients to ``.grad``; those of tied parameters summed over the ranks that hold them."""

    def __init__(self, tied: Mapping[str, dist.ProcessGroup]) -> None:
        """Take ``tied``: name -> the ranks, in the same order on all of them."""
        self._tied = tied
        self._waiting: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(
        self,
        gradients: ParameterGradients,
        parameters: Mapping[str, nn.Parameter],
        sums: bool,
        factor: Tensor | None = None,
    ) -> None:
        """Add ``gradients`` times ``factor``; they are used up.

        ``parameters``: this rank's, by name. ``sums``: False lets gradients of tied parameters wait for a later call.
        """
        if factor is not None:
            for _, gradient in gradients:
                _local(gradient).mul_(factor)
        # A tied weight is used by several stages, and each rank has a part of its gradient. Within an accumulation
        # window these parts wait, so that they are summed over the ranks once.
        tied = {id(parameters[name]): name for name in self._tied}
        for parameter, gradient in gradients:
            name = tied.get(id(parameter))
            if name is None:
                _accumulate(parameter, gradient)
            elif name in self._waiting:
                _local(self._waiting[name]).add_(_local(gradient))
            else:
                self._waiting[name] = gradient
        if not sums:
            return
        for name, group in self._tied.items():
            parameter = parameters[name]
            if not parameter.requires_grad:
                continue
            # Every rank of the group takes part, also one whose stages have not used the weight in this window.
            gradient = self._waiting.pop(name) if name in self._waiting else torch.zeros_like(parameter)
            total = _local(gradient).contiguous()
            dist.all_reduce(total, group=group)
            _local(gradient).copy_(total)
            _accumulate(parameter, gradient)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        _local(parameter.grad).add_(_local(gradient))


class _ValueWithGradient(torch.autograd.Function):
    """``value`` again; its backward hands on its gradient, of the same shape, once. ``anchor`` makes it require one."""

    @staticmethod
    def forward(ctx: FunctionContext, anchor: Tensor, value: Tensor, add: Callable[[Tensor], None]) -> Tensor:
        ctx.run = add
        return value.clone()

    @staticmethod
    def backward(ctx: FunctionContext, gradient: Tensor) -> tuple[None, None, None]:
        _once(ctx)(gradient)
        return None, None, None


class _OutputsWithBackward(torch.autograd.Function):
    """``values`` again; the backward of all of them is ``backward(their gradients)``, of which some may be missing."""

    @staticmethod
    def forward(
        ctx: FunctionContext, anchor: Tensor, backward: Callable[[OutputGradients], None], *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run = backward
        # An output that the loop has not used has no gradient, and not one of zeros.
        ctx.set_materialize_grads(False)
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: FunctionContext, *gradients: Tensor | None) -> tuple[None, ...]:
        _once(ctx)(gradients)
        return (None, None, *(None for _ in gradients))


def _once(ctx: FunctionContext) -> Any:
    """Return what a backward is to run.

    Raises:
        UsageError: it was run before, or its own gradient is asked for.
    """
    if ctx.run is None:
        raise UsageError(
            "Backward came to a forward of a pipeline a second time, but its stages free what they have computed in "
            "the first one, also with retain_graph=True. Add up the losses and call backward once, or call the "
            "model once for each backward."
        )
    # So it is with create_graph=True.
    if torch.is_grad_enabled():
        raise UsageError(
            "A gradient of a gradient (create_graph=True) was asked for, which a pipeline does not compute. Use "
            "parallel='ddp', or take the difference of two forwards in its place."
        )
    run, ctx.run = ctx.run, None
    return run


class _BackwardStart(torch.autograd.Function):
    """A number with given gradients with respect to tensors: where a stage's backward begins."""

    @staticmethod
    def forward(ctx: FunctionContext, gradients: tuple[object, ...], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: FunctionContext, _: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.gradients)


def attach(value: Tensor, add: Callable[[Tensor], None]) -> Tensor:
    """Return ``value`` as a number whose backward calls ``add(gradient of it)``, once."""
    return _ValueWithGradient.apply(_anchor(value), value, add)


def attach_outputs(values: list[Tensor], backward: Callable[[OutputGradients], None]) -> list[Tensor]:
    """Return ``values`` as tensors whose backward calls ``backward(their gradients)``; None where there is none."""
    return list(_OutputsWithBackward.apply(_anchor(values[0]), backward, *values))


def pull(tensors: list[Tensor], gradients: list[Tensor | None]) -> Tensor:
    """Return a number whose backward gives ``tensors`` these gradients."""
    return _BackwardStart.apply(tuple(gradients), *tensors)


def _anchor(like: Tensor) -> Tensor:
    return torch.zeros((), device=like.device, requires_grad=True)
