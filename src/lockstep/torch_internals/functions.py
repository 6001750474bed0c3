"""Functions of torch on their way to tensors: a mode that sees whether any is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from lockstep.torch_internals.versions import expect, probed

TorchFunction: TypeAlias = Callable[..., Any]
"""A function of torch, as modes get it: what it takes and returns is its own affair."""


class SeesFunctions(TorchFunctionMode):
    """From ``begin`` to ``end``, which may be in different contexts, notes whether a function of torch is called."""

    def __init__(self) -> None:
        super().__init__()
        self.has_seen = False

    def begin(self) -> None:
        _push_mode(self)

    def end(self) -> None:
        """Relies on: modes are a stack, from which others above this one can be taken and put back."""
        above = []
        while (mode := _get_current_function_mode()) is not self and mode is not None:
            above.append(_pop_mode())
        if mode is self:
            _pop_mode()
        for other in reversed(above):
            _push_mode(other)

    def __torch_function__(
        self,
        func: TorchFunction,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        self.has_seen = True
        return func(*args, **(kwargs or {}))


@probed("TorchFunctionMode", "keeps modes on a stack")
def probe() -> None:
    """A mode that ends below another one."""
    sees = SeesFunctions()
    sees.begin()
    torch.ones(1).tolist()
    expect(sees.has_seen, "a mode that has begun")
    with torch.device("cpu"):
        sees.end()
        sees.has_seen = False
        torch.ones(1).tolist()
        expect(not sees.has_seen, "a mode that has ended")
