"""Noticing the first call of a prepared model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.utils.hooks import RemovableHandle

from lockstep.model.changes import UncopiedHook


class FirstForward(UncopiedHook):
    """A forward pre-hook that calls ``tell`` once."""

    def __init__(self, model: nn.Module, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._handle: RemovableHandle | None = model.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: object) -> None:
        self._tell()
        if self._handle is not None:
            self._handle.remove()
