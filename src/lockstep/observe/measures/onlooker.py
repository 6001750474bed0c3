"""Where measures look on: forwards of prepared models, and the clock of the steps. Neither keeps them alive."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

from torch import nn

from lockstep.model.changes import UncopiedHook


class WeakHook(UncopiedHook):
    """Calls a method, with ``first`` before other arguments, as long as its object lives."""

    def __init__(self, method: Callable[..., object], *first: object) -> None:
        assert isinstance(method, MethodType)
        # Not a WeakMethod, whose call is one more in Python for each batch.
        self._owner, self._function = weakref.ref(method.__self__), method.__func__
        self._first = first

    def __call__(self, *args: object) -> Any:
        owner = self._owner()
        return None if owner is None else self._function(owner, *self._first, *args)


def look_on(
    onlooker: object,
    registrations: Sequence[tuple[list[Any], Callable[..., object]]],
    finish: Callable[[str], object],
    at_end: Callable[[], None] | None,
) -> Callable[[], object]:
    """Call methods of ``onlooker`` at what each list of listeners is for, as long as it lives; then ``at_end``.

    Args:
        registrations: (listeners, method) of each.
        finish: Called with "exit" at the end of the process.
        at_end: Must not keep ``onlooker`` alive.

    Returns:
        What ends it before.
    """
    hooks = [(listeners, WeakHook(method)) for listeners, method in registrations]
    at_exit = WeakHook(finish, "exit")

    def forget() -> None:
        for listeners, hook in hooks:
            if hook in listeners:
                listeners.remove(hook)
        atexit.unregister(at_exit)
        if at_end is not None:
            at_end()

    for listeners, hook in hooks:
        listeners.append(hook)
    end = weakref.finalize(onlooker, forget)
    # Registered after the finalizer, so called before it.
    atexit.register(at_exit)
    return end


def look_on_calls(module: nn.Module, begins: Callable[..., None], ends: Callable[..., None]) -> None:
    """Have each call of this module told, before what its other hooks do and after it."""
    module.register_forward_pre_hook(WeakHook(begins), prepend=True, with_kwargs=True)
    module.register_forward_hook(WeakHook(ends), always_call=True)
