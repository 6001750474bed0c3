"""Noticing the first call of a prepared model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class FirstForward:
    """A forward pre-hook that calls ``tell`` once. Copies and pickles of the model lose it."""

    def __init__(self, model: nn.Module, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._handle: RemovableHandle | None = model.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: object) -> None:
        self._tell()
        if self._handle is not None:
            self._handle.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        return _copy_of_hook, ()


def _copy_of_hook() -> Callable[[nn.Module, object], None]:
    return _ignore


def _ignore(module: nn.Module, args: object) -> None:
    """What is left of ``FirstForward`` in a copy."""
