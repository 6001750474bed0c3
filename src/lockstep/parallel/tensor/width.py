"""The input of an attention module that counts this rank's heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.shape.__get__ or func == Tensor.size:  # type: ignore[attr-defined]
            tensor = args[0]
            shape = torch.Size((*tensor.whole.shape[:-1], tensor.width))
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            return shape if dim is None else shape[dim]
        return func(*map(_whole, args), **{name: _whole(value) for name, value in kwargs.items()})


def _whole(value: object) -> object:
    if isinstance(value, ReportedWidth):
        return value.whole
    if isinstance(value, (list, tuple)):
        return type(value)(map(_whole, value)) if type(value) in (list, tuple) else value
    return value
