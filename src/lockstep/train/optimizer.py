"""An optimizer that steps only when gradients were synchronised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.errors import UsageError
from lockstep.runtime.step import StepState
from lockstep.train.loss_scale import LossScaler


class PreparedOptimizer(Optimizer):
    """Stands for the user's optimizer, which is at ``.optimizer``.

    ``step`` and ``zero_grad`` do nothing inside an accumulation window. With fp16, ``step`` goes
    through the loss scaler, and ``step_was_skipped`` tells whether it met infinite gradients.
    Everything else is the user's optimizer's own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step: StepState,
        scaler: LossScaler | None = None,
        before_first_step: Callable[[Optimizer], None] | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: there is one set of groups and state, the user's.
        self.optimizer = optimizer
        self._step_state = step
        self._scaler = scaler
        self._before_first_step = before_first_step
        self._ran = True
        self._found_inf: torch.Tensor | None = None
        if scaler is not None:
            scaler.register(optimizer)
            optimizer.register_step_pre_hook(self._note_step)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not yet set: while unpickling or copying
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        # The check belongs to one Accelerator, which neither a copy nor a file should carry along.
        return {**self.__dict__, "_before_first_step": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, except inside an accumulation window."""
        if self._step_state.sync_gradients:
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Step, except inside an accumulation window or, with fp16, on infinite gradients.

        Raises:
            UsageError: a closure with fp16, whose gradients cannot be looked at before the step.
        """
        if not self._step_state.sync_gradients:
            return None
        if self._before_first_step is not None:
            self._before_first_step(self.optimizer)
            self._before_first_step = None
        if self._scaler is None:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        if closure is not None:
            raise UsageError(
                f"{type(self.optimizer).__name__}.step got a closure under mixed_precision='fp16', where gradients "
                "must be unscaled before the step. Use 'bf16' or 'no', or call step() without a closure."
            )
        self._ran, self._found_inf = False, None
        self._scaler.step(self.optimizer)
        return None

    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Fused optimizers are always called and get the verdict as ``found_inf``.
        self._ran, self._found_inf = True, getattr(optimizer, "found_inf", None)

    @property
    def step_was_skipped(self) -> bool:
        """The last ``step`` of a window changed nothing, because fp16 gradients were infinite or NaN."""
        return not self._ran or (self._found_inf is not None and bool(self._found_inf.item()))

    @property
    def skipped(self) -> bool:
        return self.step_was_skipped

    def train(self) -> None:
        """Of optimizers that have modes, such as schedule-free ones; nothing for the others."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """See ``train``."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    def __repr__(self) -> str:
        return repr(self.optimizer)
