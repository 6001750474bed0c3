"""Mixed precision: autocast around a model's forward.

Parameters, gradients and optimizer state stay fp32; only the operations inside ``forward`` run in
the lower precision, and what ``forward`` returns is fp32 again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lockstep.comm.tree import to_float32
from lockstep.config.handlers import AutocastKwargs

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(
    mixed_precision: str, device: torch.device, options: AutocastKwargs
) -> AbstractContextManager[Any]:
    """The context in which a forward runs with this ``mixed_precision`` (``no``: one that does nothing)."""
    dtype = DTYPES.get(mixed_precision)
    if dtype is None:
        return nullcontext()
    return torch.autocast(
        device.type, dtype=dtype, enabled=options.enabled, cache_enabled=options.cache_enabled
    )


class AutocastForward:
    """Mixed into a model's class by ``autocast_forward``: calls run under autocast and return fp32."""

    _autocast_settings: tuple[str, torch.device, AutocastKwargs]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with autocast(*self._autocast_settings):
            outputs = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return to_float32(outputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _plain_class(self):  # as the user's class is copied
            copied = copy.deepcopy(self, memo)
        copied.__class__ = type(self)
        return copied

    def __copy__(self) -> Any:
        with _plain_class(self):
            copied = copy.copy(self)
        copied.__class__ = type(self)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled as the user's own class, because nobody can import the subclass. So the file can be
        # loaded without Lockstep, and what is loaded computes in fp32.
        plain: Any = object.__new__(_plain(self))
        plain.__dict__.update(self.__dict__)
        del plain._autocast_settings
        # Of protocol 1 is the form that does not insist on the class of the object at hand.
        return plain.__reduce_ex__(1)


def _plain(model: Any) -> type:
    return type(model).__bases__[1]


@contextmanager
def _plain_class(model: Any) -> Iterator[None]:
    cls = type(model)
    model.__class__ = _plain(model)
    try:
        yield
    finally:
        model.__class__ = cls


def autocast_forward(
    model: nn.Module, mixed_precision: str, device: torch.device, options: AutocastKwargs
) -> nn.Module:
    """Make calls of ``model`` run under autocast, in place.

    As in torch's ``fully_shard``, the object gets a subclass of its own class: attributes, hooks,
    ``isinstance``, ``deepcopy`` and ``torch.save`` work as before, and ``remove_autocast`` gives the class back.
    """
    if mixed_precision not in DTYPES or isinstance(model, AutocastForward):
        return model
    cls = type(model)
    model.__class__ = type(cls.__name__, (AutocastForward, cls), {"__module__": cls.__module__})
    model._autocast_settings = (mixed_precision, device, options)  # type: ignore[assignment]
    return model


def remove_autocast(model: nn.Module) -> nn.Module:
    """Undo ``autocast_forward``; other models are returned as they are."""
    if isinstance(model, AutocastForward):
        model.__class__ = _plain(model)
        del model._autocast_settings
    return model
