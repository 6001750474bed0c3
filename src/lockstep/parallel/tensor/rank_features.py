"""Features that a rank alone has, and what stands for them in the forwards of split modules.

- ``RankFeatures`` are marked where a column layer makes them, and what is computed with them is marked too. An operand
  without the mark is whole, and the same on all ranks. Where it meets marked ones, each rank uses it for its features
  alone, so that its gradient is complete only as the sum over the ranks: it is taken there. What it was computed from,
  and where else it is used, does not matter then.
- ``ReportedWidth``: the input of an attention module that counts this rank's heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.tree import Args, Kwargs
from lockstep.errors import UsageError
from lockstep.torch_internals.dispatch import TorchFunction


class ReportedWidth(Tensor):
    """A tensor that reports a smaller last dimension, and is used whole.

    Attention often finds the width of its heads as ``x.shape[-1] // self.heads``. With this rank's share of the
    heads, the width must be this rank's share too. All but ``shape`` and ``size`` sees the tensor as it is.
    """

    whole: Tensor
    width: int

    @classmethod
    def of(cls, whole: Tensor, width: int) -> ReportedWidth:
        reported = whole.as_subclass(cls)
        reported.whole, reported.width = whole, width
        return reported

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func == Tensor.shape.__get__ or func == Tensor.size:  # type: ignore[attr-defined]
            tensor = args[0]
            shape = torch.Size((*tensor.whole.shape[:-1], tensor.width))
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            return shape if dim is None else shape[dim]
        return func(
            *map(_without_marks, args), **{name: _without_marks(value) for name, value in kwargs.items()}
        )


def _without_marks(value: object) -> object:
    if isinstance(value, ReportedWidth):
        return value.whole
    if isinstance(value, (list, tuple)):
        return type(value)(map(_without_marks, value)) if type(value) in (list, tuple) else value
    return value


class RankFeatures(Tensor):
    """What a rank computed of its features. ``summing`` gives an operand whose gradient is summed.

    Without ``summing`` it is an operand whose gradient is summed already.
    """

    plain: Tensor
    summing: Callable[[Tensor], Tensor] | None

    @classmethod
    def of(cls, plain: Tensor, summing: Callable[[Tensor], Tensor] | None) -> RankFeatures:
        marked = plain.as_subclass(cls)
        marked.plain, marked.summing = plain, summing
        return marked

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            raise UsageError(
                "The loss was computed from a part of a tensor: a module that is split over ranks (tp) keeps "
                "activations in an attribute, or a hook takes them out. Compute such a term from what the module "
                "returns, or keep the module whole with 'tp_plan': {'NAME': 'replicate'}."
            )
        summing = _first_summing(args, kwargs)
        result = func(
            *(_operand(value, summing) for value in args),
            **{name: _operand(value, summing) for name, value in kwargs.items()},
        )
        # Not inside of functions of autograd: what they give has a graph of its own.
        return _marked(result, summing) if summing is not None and torch.is_grad_enabled() else result

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        return self.plain.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)


def unmarked(value: Any) -> Any:
    """Return the plain tensor."""
    return value.plain if isinstance(value, RankFeatures) else value


def _first_summing(args: Args, kwargs: Kwargs) -> Callable[[Tensor], Tensor] | None:
    waiting = [*args, *kwargs.values()]
    for value in waiting:
        if isinstance(value, RankFeatures) and value.summing is not None:
            return value.summing
        if isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
    return None


def _operand(value: Any, summing: Callable[[Tensor], Tensor] | None) -> object:
    if isinstance(value, RankFeatures):
        return value.plain
    if isinstance(value, ReportedWidth):
        value = value.whole
    if isinstance(value, Tensor) and summing is not None:
        return summing(value) if value.requires_grad and torch.is_grad_enabled() else value
    if type(value) in (list, tuple):
        return type(value)(_operand(inner, summing) for inner in value)
    return value


def _marked(value: object, summing: Callable[[Tensor], Tensor]) -> object:
    if isinstance(value, Tensor):
        return RankFeatures.of(value, summing)
    if isinstance(value, (list, tuple)) and any(isinstance(inner, Tensor) for inner in value):
        return type(value)([_marked(inner, summing) for inner in value])
    return value
