"""Where measures look on: forwards of prepared models, and the clock of the steps. Neither keeps them alive."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn

from lockstep.model.changes import UncopiedHook
from lockstep.runtime.clock import StepClock


class Onlooker(Protocol):
    """Who is told."""

    def step_ends(self) -> None: ...
    def batch_comes(self, batch: object) -> None: ...
    def news(self, name: str, values: Mapping[str, object]) -> None: ...
    def finish(self, reason: str) -> None: ...
    def call_begins(self, module: nn.Module, args: object, kwargs: object) -> None: ...
    def call_ends(self) -> None: ...
    def for_people(self) -> Mapping[str, float]: ...


def look_on(clock: StepClock, onlooker: Onlooker, at_end: Callable[[], None] | None) -> Callable[[], object]:
    """Tell ``onlooker`` of steps, batches, news and the end of the process, as long as it lives; then ``at_end``.

    Returns what ends it before. ``at_end`` must not keep ``onlooker`` alive.
    """
    this = weakref.ref(onlooker)

    def step_ends() -> None:
        if (alive := this()) is not None:
            alive.step_ends()

    def batch_comes(batch: object) -> None:
        if (alive := this()) is not None:
            alive.batch_comes(batch)

    def news(name: str, values: Mapping[str, object]) -> None:
        if (alive := this()) is not None:
            alive.news(name, values)

    def at_exit() -> None:
        if (alive := this()) is not None:
            alive.finish("exit")

    def forget() -> None:
        for listeners, one in registrations:
            if one in listeners:
                listeners.remove(one)
        atexit.unregister(at_exit)
        if at_end is not None:
            at_end()

    registrations: list[tuple[list[Any], Any]] = [
        (clock.at_step, step_ends),
        (clock.at_batch, batch_comes),
        (clock.at_news, news),
    ]
    for listeners, one in registrations:
        listeners.append(one)
    end = weakref.finalize(onlooker, forget)
    # Registered after the finalizer, so called before it.
    atexit.register(at_exit)
    return end


def show_latest(clock: StepClock, onlooker: Onlooker) -> None:
    """Have the clock give the latest numbers of ``onlooker``, as long as it lives."""
    this = weakref.ref(onlooker)

    def latest() -> Mapping[str, float]:
        alive = this()
        return {} if alive is None else alive.for_people()

    clock.latest = latest


def look_on_calls(module: nn.Module, onlooker: Onlooker) -> None:
    """Tell ``onlooker`` of each call of this module, before what its other hooks do and after it."""
    module.register_forward_pre_hook(_BeforeCall(onlooker), prepend=True, with_kwargs=True)
    module.register_forward_hook(_AfterCall(onlooker), always_call=True)


class _BeforeCall(UncopiedHook):
    """A forward pre-hook, which pipelines call without keywords."""

    def __init__(self, onlooker: Onlooker) -> None:
        self._onlooker = weakref.ref(onlooker)

    def __call__(self, module: nn.Module, args: object, kwargs: object = None) -> None:
        if (alive := self._onlooker()) is not None:
            alive.call_begins(module, args, kwargs)


class _AfterCall(UncopiedHook):
    """A forward hook."""

    def __init__(self, onlooker: Onlooker) -> None:
        self._onlooker = weakref.ref(onlooker)

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        if (alive := self._onlooker()) is not None:
            alive.call_ends()
