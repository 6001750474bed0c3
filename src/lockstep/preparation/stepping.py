"""What is looked at when an optimizer steps: whose parameters it holds, who called it, and silent damage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.errors import UsageError
from lockstep.observe.damage.checks import DamageWatch
from lockstep.runtime.step import StepState
from lockstep.torch_internals.optim import StepListeners
from lockstep.train.optimizer import PreparedOptimizer
from lockstep.train.whole.apply import whole_step_of
from lockstep.train.whole.kinds import place_of


class StepChecks:
    """Refuses steps that would train nothing, or parameters that only this rank has. Where ranks are several.

    An optimizer that holds parameters of a prepared model must have been prepared, where models get other parameters
    than they had, gradients are scaled, or a window of micro-batches is open. One that holds none is left alone.

    Args:
        replaces_parameters: Prepared models have other parameters than they were built with.
        is_scaled: Gradients are those of a scaled loss.
        is_replaced: Whether a parameter is one in whose place another came.
        parameters: Those of the prepared models, as they are between steps.
        optimizers: The prepared ones.
    """

    def __init__(
        self,
        step: StepState,
        replaces_parameters: bool,
        is_scaled: bool,
        is_replaced: Callable[[torch.Tensor], bool],
        parameters: Callable[[], Iterable[torch.Tensor]],
        optimizers: list[PreparedOptimizer],
    ) -> None:
        self._step = step
        self._replaces = replaces_parameters
        self._is_scaled = is_scaled
        self._is_replaced = is_replaced
        self._parameters = parameters
        self._optimizers = optimizers
        # How many parameters each held when it was looked at, and whether some are a prepared model's.
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()

    def start(self) -> None:
        """Look at each step from now on."""
        _BEFORE_STEPS.add(self)

    def stop(self) -> None:
        _BEFORE_STEPS.remove(self)
        self._known.clear()

    def check(self, optimizer: Optimizer) -> None:
        """Raise UsageError if this optimizer must not step now."""
        if self._step.stepping or any(self._runs(prepared.optimizer) for prepared in self._optimizers):
            return  # called by a prepared one
        if any(optimizer is prepared.optimizer for prepared in self._optimizers):
            self._check_caller(optimizer, "called directly, not through what prepare returned")
            return
        count_now = sum(len(group["params"]) for group in optimizer.param_groups)
        count, is_ours = self._known.get(optimizer, (-1, False))
        if count != count_now:
            is_ours = self._holds_ours(optimizer)
            self._known[optimizer] = (count_now, is_ours)
        if is_ours:
            self._check_caller(optimizer, "not passed to prepare")

    @staticmethod
    def _runs(optimizer: Optimizer) -> bool:
        whole = whole_step_of(optimizer)
        return whole is not None and whole.is_at_work

    def _holds_ours(self, optimizer: Optimizer) -> bool:
        """Return whether it steps parameters of a prepared model; raises where it would not."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known = {id(parameter) for parameter in self._parameters()}
        replaced = [
            parameter
            for parameter in parameters
            if id(parameter) not in known and self._is_replaced(parameter)
        ]
        if replaced:
            raise UsageError(
                f"{type(optimizer).__name__} ({place_of(optimizer)}) holds {len(replaced)} parameters that a "
                "model had before it was prepared. prepare() replaced these parameters, so this step would "
                "train nothing. Pass the optimizer to accelerator.prepare() too, and call step() of the "
                "optimizer that it returns."
            )
        ours = [parameter for parameter in parameters if id(parameter) in known]
        if ours and self._replaces:
            raise UsageError(
                f"{type(optimizer).__name__} ({place_of(optimizer)}) trains {len(ours)} parameters of a prepared "
                "model, but was not prepared. Write `model, optimizer = accelerator.prepare(model, optimizer)`, and "
                "call step() of this optimizer."
            )
        return bool(ours)

    def _check_caller(self, optimizer: Optimizer, how: str) -> None:
        wrong = (
            "inside an accumulation window, whose gradients the ranks have not averaged yet"
            if not self._step.sync_gradients
            else "with fp16, whose gradients are still scaled"
            if self._is_scaled
            else None
        )
        if wrong is not None:
            raise UsageError(
                f"The step of {type(optimizer).__name__} ({place_of(optimizer)}) was {how}, {wrong}. Pass the "
                "optimizer to accelerator.prepare(), and call step() of the optimizer that it returns."
            )


_BEFORE_STEPS = StepListeners(register_optimizer_step_pre_hook, StepChecks.check)


class CheckedOptimizer(PreparedOptimizer):
    """As ``PreparedOptimizer``; a step on gradients that are not finite is left out where that is asked for.

    With fp16 the loss scaler leaves such steps out already, and is only watched.
    """

    def __init__(self, optimizer: Optimizer, *args: Any, checks: DamageWatch, **options: Any) -> None:
        super().__init__(optimizer, *args, **options)
        self._checks: DamageWatch | None = checks
        checks.add(optimizer)

    def __getstate__(self) -> dict[str, object]:
        # The checks belong to one Accelerator, which neither a copy nor a file should carry along.
        return {**super().__getstate__(), "_checks": None}

    def step(self, closure: object = None) -> Any:
        """See ``PreparedOptimizer.step``.

        Raises:
            DamageError: parameters differ among ranks, or gradients are not finite and that is to stop the run.
            UsageError: a closure, whose gradients cannot be looked at before the step.
        """
        checks = self._checks
        if checks is None or not self.gradient_state.sync_gradients:
            return super().step(closure)
        if closure is not None and checks.reads_gradients:
            raise UsageError(
                f"{type(self.optimizer).__name__}.step got a closure, but DamageChecks(bad_gradients=...) looks at "
                "gradients before the step. Leave bad_gradients at 'ignore', or call step() without a closure."
            )
        if self._scaler is not None:
            result = super().step(closure)
            skipped = checks.reads_gradients and self.step_was_skipped
            checks.stepped(self.optimizer, self._scaler.scaler.get_scale() if skipped else None)
            return result
        self._ran = checks.may_step(self.optimizer)
        if not self._ran:
            self.gradient_state.clock.stepped()
            checks.skipped(self.optimizer)
            return None
        result = super().step(closure)
        checks.stepped(self.optimizer)
        return result
