"""Dropout switched off: ranks that share a model's layers draw masks of their own."""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn

from lockstep.model.changes import UncopiedHook
from lockstep.parallel.determinism import WithoutDropout, without_dropout
from lockstep.parallel.parallel_model import ParallelModel


def switch_dropout_off(model: ParallelModel) -> None:
    """Layers of a model drop nothing from now on, nor do functions that it calls in ``forward``."""
    ended = _DropsAgain()
    ended.stack.enter_context(without_dropout(list(model.plain.modules())))
    model.module.register_forward_pre_hook(_DropsNothing(ended), prepend=True)
    model.module.register_forward_hook(ended, always_call=True)


class _DropsAgain(UncopiedHook):
    """A forward hook: functions drop again. It holds what keeps layers from it."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.modes = ExitStack()

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        self.modes.close()


class _DropsNothing(UncopiedHook):
    """A forward pre-hook: functions drop nothing."""

    def __init__(self, ended: _DropsAgain) -> None:
        self._ended = ended

    def __call__(self, module: nn.Module, args: object) -> None:
        self._ended.modes.enter_context(WithoutDropout())
