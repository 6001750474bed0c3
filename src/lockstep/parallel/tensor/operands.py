"""Whole tensors that meet a rank's features: the gradient of such an operand is a sum over the ranks.

The features of a rank are marked where a column layer makes them, and what is computed with them is marked too.
An operand without the mark is whole, and the same on all ranks. Where it meets marked ones, each rank uses it for its
features alone, so that its gradient is complete only as the sum over the ranks: it is taken there. What the operand was
computed from, and where else it is used, does not matter then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.parallel.tensor.width import ReportedWidth


class RankFeatures(Tensor):
    """What a rank computed of its features. ``summing`` gives an operand whose gradient is summed."""

    plain: Tensor
    summing: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, plain: Tensor, summing: Callable[[Tensor], Tensor]) -> RankFeatures:
        marked = plain.as_subclass(cls)
        marked.plain, marked.summing = plain, summing
        return marked

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        summing = _first(args, kwargs).summing
        result = func(
            *(_operand(value, summing) for value in args),
            **{name: _operand(value, summing) for name, value in kwargs.items()},
        )
        return _marked(result, summing)

    def __deepcopy__(self, memo: object) -> Tensor:
        return self.plain.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.plain.__reduce_ex__(protocol)


def unmarked(value: object) -> Any:
    """The plain tensor."""
    return value.plain if isinstance(value, RankFeatures) else value


def _first(args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    waiting = [*args, *kwargs.values()]
    for value in waiting:
        if isinstance(value, RankFeatures):
            return value
        if isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
    raise TypeError("no operand is marked")


def _operand(value: Any, summing: Callable[[Tensor], Tensor]) -> object:
    if isinstance(value, RankFeatures):
        return value.plain
    if isinstance(value, ReportedWidth):
        value = value.whole
    if isinstance(value, Tensor):
        return summing(value) if value.requires_grad and torch.is_grad_enabled() else value
    if type(value) in (list, tuple):
        return type(value)(_operand(inner, summing) for inner in value)
    return value


def _marked(value: object, summing: Callable[[Tensor], Tensor]) -> object:
    if isinstance(value, Tensor):
        return RankFeatures.of(value, summing)
    if isinstance(value, (list, tuple)) and any(isinstance(inner, Tensor) for inner in value):
        marked = [_marked(inner, summing) for inner in value]
        return type(value)(marked)
    return value
