"""Mixed precision: autocast around a model's forward.

Parameters, gradients and optimizer state stay fp32; only the operations inside ``forward`` run in
the lower precision, and what ``forward`` returns is fp32 again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from lockstep.comm.tree import to_float32
from lockstep.config.handlers import AutocastKwargs
from lockstep.model.changes import Subclassed, subclass

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def autocast(
    mixed_precision: str, device: torch.device, options: AutocastKwargs
) -> AbstractContextManager[object]:
    """Return the context in which a forward runs with this ``mixed_precision`` (``no``: one that does nothing)."""
    dtype = DTYPES.get(mixed_precision)
    if dtype is None:
        return nullcontext()
    return torch.autocast(
        device.type, dtype=dtype, enabled=options.enabled, cache_enabled=options.cache_enabled
    )


class AutocastForward(Subclassed):
    """Mixed into a model's class by ``autocast_forward``: calls run under autocast and return fp32.

    What is loaded from a pickle computes in fp32.
    """

    _attributes = ("_autocast_settings",)
    _autocast_settings: tuple[str, torch.device, AutocastKwargs]

    def __call__(self, *args: object, **kwargs: object) -> object:
        with autocast(*self._autocast_settings):
            outputs = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return to_float32(outputs)


def autocast_forward(
    model: nn.Module, mixed_precision: str, device: torch.device, options: AutocastKwargs
) -> nn.Module:
    """Make calls of ``model`` run under autocast, in place.

    As in torch's ``fully_shard``, the object gets a subclass of its own class: attributes, hooks,
    ``isinstance``, ``deepcopy`` and ``torch.save`` work as before, and ``remove_autocast`` gives the class back.
    """
    if mixed_precision not in DTYPES or isinstance(model, AutocastForward):
        return model
    model.__class__ = subclass(type(model), AutocastForward)
    model._autocast_settings = (mixed_precision, device, options)  # type: ignore[assignment]
    return model


def remove_autocast(model: nn.Module) -> nn.Module:
    """Undo ``autocast_forward``, and a forward that a script put in place of its ``_original_forward``."""
    if isinstance(model, AutocastForward):
        model.__class__ = model._plain_class
        del model._autocast_settings
    if "_original_forward" in vars(model):
        model.forward = vars(model).pop("_original_forward")
    return model
