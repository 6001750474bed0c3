"""Parameters from before a model was sharded: using one is an error, and not a use of nothing.

Relies on: the class of a parameter can be changed to a subclass and back; ``__torch_function__`` of the subclass is
asked before anything is read or computed; ``torch._C.DisableTorchFunctionSubclass``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lockstep.errors import UsageError

_HARMLESS = ("__get__", "__repr__", "__hash__", "__format__", "__reduce_ex__", "__deepcopy__")
_VALUES = tuple(
    getattr(torch.Tensor, name) for name in ("data", "grad", "T", "mT", "H", "mH", "real", "imag")
)
_LOOKS = (
    "size",
    "dim",
    "numel",
    "stride",
    "is_floating_point",
    "is_complex",
    "element_size",
    "nelement",
    "type",
    "untyped_storage",
    "data_ptr",
    "storage_offset",
    "is_contiguous",
)


class ReplacedParameter(nn.Parameter):
    """What a parameter becomes when shards take its place. It may be looked at, and is equal to itself only."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = getattr(function, "__name__", "")
        # ``data`` and ``grad`` are asked for as ``__get__``, which does no harm with other attributes.
        reads_values = any(getattr(function, "__self__", None) is value for value in _VALUES)
        if (name in _HARMLESS or name in _LOOKS) and not reads_values:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise UsageError(
            "The script used a parameter that a model had before accelerator.prepare() divided it, and the "
            "values of that parameter are gone. Take parameters from the prepared model (model.parameters()), "
            "and pass optimizers to prepare() together with the model. In a forward, read parameters from "
            "modules (self.scale), not from a function or a list that has kept them."
        )


def retire(parameter: nn.Parameter) -> None:
    """Empty a parameter, and let each use of it raise UsageError."""
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    if type(parameter) is nn.Parameter:
        parameter.__class__ = ReplacedParameter


def revive(parameter: nn.Parameter) -> None:
    """Let a retired parameter, which is empty, be used again."""
    if type(parameter) is ReplacedParameter:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
