"""An optimizer that looks for silent damage before and after each step."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from lockstep.errors import UsageError
from lockstep.observe.damage.checks import DamageWatch
from lockstep.train.optimizer import PreparedOptimizer


class CheckedOptimizer(PreparedOptimizer):
    """As ``PreparedOptimizer``; a step on gradients that are not finite is left out where that is asked for.

    With fp16 the loss scaler leaves such steps out already, and is only watched.
    """

    def __init__(self, optimizer: Optimizer, *args: Any, checks: DamageWatch, **options: Any) -> None:
        super().__init__(optimizer, *args, **options)
        self._checks: DamageWatch | None = checks
        checks.add(optimizer)

    def __getstate__(self) -> dict[str, Any]:
        # The checks belong to one Accelerator, which neither a copy nor a file should carry along.
        return {**super().__getstate__(), "_checks": None}

    def step(self, closure: object = None) -> Any:
        """See ``PreparedOptimizer.step``.

        Raises:
            DamageError: parameters differ among ranks, or gradients are not finite and that is to stop the run.
            UsageError: a closure, whose gradients cannot be looked at before the step.
        """
        checks = self._checks
        if checks is None or not self._step_state.sync_gradients:
            return super().step(closure)
        if closure is not None and checks.looks_at_gradients:
            raise UsageError(
                f"{type(self.optimizer).__name__}.step got a closure, but DamageChecks(bad_gradients=...) looks at "
                "gradients before the step. Leave bad_gradients at 'ignore', or call step() without a closure."
            )
        if self._scaler is not None:
            result = super().step(closure)
            skipped = checks.looks_at_gradients and self.step_was_skipped
            checks.stepped(self.optimizer, self._scaler.scaler.get_scale() if skipped else None)
            return result
        self._ran = checks.may_step(self.optimizer)
        if not self._ran:
            self._step_state.clock.stepped()
            checks.skipped(self.optimizer)
            return None
        result = super().step(closure)
        checks.stepped(self.optimizer)
        return result
