"""An optimizer that steps only when gradients were synchronised."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.comm.tree import StateDict
from lockstep.errors import ConfigError, UsageError
from lockstep.runtime.step import StepState
from lockstep.train.clipping import OtherStages, clip_norm
from lockstep.train.loss_scale import LossScaler, scale_by

ParamGroup = StateDict
"""Parameters of an optimizer with its options for them."""


class PreparedOptimizer(Optimizer):
    """The optimizer that ``prepare`` returns. The user's own optimizer is ``.optimizer``.

    ``step`` and ``zero_grad`` do nothing before the last micro-batch of an accumulation window. With fp16, ``step``
    uses the loss scaler, and ``step_was_skipped`` tells whether gradients were infinite. All other attributes are
    those of the user's optimizer.

    Args:
        optimizer: The user's own optimizer.
        step: The state of the current step.
        scaler: The loss scale of fp16. None: there is none.
        before_first_step: A function that is called with the optimizer before its first step.
        clip_norm: Before each step, scale the gradients of this optimizer to at most this 2-norm. None: do not clip.
        after_zero_grad: A function that clears gradients that are not at ``parameter.grad``.
        other_stages: A function that returns the ranks with other parameters of the same models, for ``clip_norm``.
        before_step: A function that is called before each step, with the optimizer and whether there is a closure.
        after_clip: A function that is called with the norm before clipping, a 0-d tensor.
        may_step: A function that is asked before each step, with unscaled gradients. If it returns False, the step is
            skipped.

    Raises:
        ConfigError: ``clip_norm`` is not positive.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for micro_batch in torch.randn(2, 8, 4):
            with accelerator.accumulate(model):
                accelerator.backward(model(micro_batch).square().mean())
                optimizer.step()  # of the second micro-batch only
                optimizer.zero_grad()
        assert not optimizer.step_was_skipped
        ```
    """

    # The learning rate at the last micro-batch of a window, and whether its change is still to be said.
    _rate, _warns = None, True

    def __init__(
        self,
        optimizer: Optimizer,
        step: StepState,
        scaler: LossScaler | None = None,
        before_first_step: Callable[[Optimizer], None] | None = None,
        clip_norm: float | None = None,
        after_zero_grad: Callable[[], None] | None = None,
        other_stages: Callable[[], OtherStages | None] | None = None,
        before_step: Callable[[Optimizer, bool], None] | None = None,
        after_clip: Callable[[torch.Tensor], None] | None = None,
        may_step: Callable[[Optimizer], bool] | None = None,
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise ConfigError(
                f"gradient_clipping is {clip_norm}, but must be above 0. Set such a norm, or None for no clipping."
            )
        # Optimizer.__init__ is not called: there is one set of groups and state, the user's.
        self.optimizer = optimizer
        self.gradient_state = step
        self._scaler = scaler
        self._before_first_step = before_first_step
        self._after_zero_grad = after_zero_grad
        self._clip_norm = clip_norm
        self._other_stages = other_stages
        self._before_step = before_step
        self._after_clip = after_clip
        self._may_step = may_step
        self._ran = True
        self._found_inf: torch.Tensor | None = None
        if scaler is not None:
            scaler.register(optimizer)
            optimizer.register_step_pre_hook(self._note_step)

    def __getattr__(self, name: str) -> Any:
        # While it is unpickled or copied, it is not set yet.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> StateDict:
        # The check belongs to one Accelerator, which neither a copy nor a file should carry along.
        names = (
            "_before_first_step", "_after_zero_grad", "_other_stages", "_before_step", "_after_clip", "_may_step",
        )  # fmt: skip
        return {**self.__dict__, **dict.fromkeys(names)}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The groups of parameters of the user's optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, object]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the user's optimizer: parameter -> values."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> ParamGroup:
        """The default options of the user's optimizer."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, object]) -> None:
        self.optimizer.defaults = defaults

    def state_dict(self) -> StateDict:
        """Return the state of the user's optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load a state into the user's optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add a group of parameters to the user's optimizer."""
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Before the last micro-batch of an accumulation window, do nothing."""
        turns = self.gradient_state.turns
        if self.gradient_state.sync_gradients if turns is None else turns.clears():
            clock = self.gradient_state.clock
            part = clock.enter("optimizer")
            self.optimizer.zero_grad(set_to_none)
            if self._after_zero_grad is not None:
                self._after_zero_grad()
            clock.enter(part)

    def step(self, closure: object = None) -> Any:
        """Update the parameters. Before the last micro-batch of an accumulation window, do nothing.

        With fp16, the step is skipped if gradients are infinite or NaN.

        Raises:
            UsageError: a closure was passed with fp16. Its gradients cannot be checked before the step.
        """
        if self.gradient_state.turns is not None:
            return self.gradient_state.turns.step(self.optimizer, lambda: self._step_if_due(closure))
        return self._step_if_due(closure)

    def _step_if_due(self, closure: object) -> object:
        if self._rate is not None or not self.gradient_state.sync_gradients:
            self._compare_rate()
        if not self.gradient_state.sync_gradients:
            return None
        self.gradient_state.stepping = True
        self.gradient_state.clock.enter("optimizer")
        try:
            return self._step(closure)
        finally:
            self.gradient_state.stepping = False
            self.gradient_state.clock.enter("other")

    def _compare_rate(self) -> None:
        """Warn once of a learning rate that changes between the micro-batches of one step."""
        rate, before = self.optimizer.param_groups[0].get("lr"), self._rate
        self._rate = None if self.gradient_state.sync_gradients else rate
        if before is not None and rate != before and self._warns:
            self._warns = False
            warnings.warn(
                "The learning rate changes between the micro-batches of one step: a scheduler that was not "
                "prepared advances at each of them. Pass the scheduler to accelerator.prepare().",
                stacklevel=4,
            )

    def _step(self, closure: Any) -> object:
        if self.gradient_state.being_saved is not None:
            self.gradient_state.being_saved.before_step()
        self.gradient_state.clock.stepped()
        if self._before_first_step is not None:
            self._before_first_step(self.optimizer)
            self._before_first_step = None
        if self._before_step is not None:
            self._before_step(self.optimizer, closure is not None)
        if self._may_step is not None and not self._is_let(self._may_step, closure):
            return None
        if self._scaler is None:
            if closure is not None:
                return self.optimizer.step(self._clipping_after(closure))
            if self._clip_norm is not None:
                self._clip(self._clip_norm)
            return self.optimizer.step()
        if closure is not None:
            raise UsageError(
                f"{type(self.optimizer).__name__}.step got a closure under mixed_precision='fp16', where gradients "
                "must be unscaled before the step. Use 'bf16' or 'no', or call step() without a closure."
            )
        self._ran, self._found_inf = False, None
        if self._clip_norm is not None:
            # Infinite gradients are noted here, so that the step is skipped whatever clipping makes of them.
            self._scaler.unscale(self.optimizer)
            self._clip(self._clip_norm)
        self._scaler.step(self.optimizer)
        return None

    def _is_let(self, may_step: Callable[[Optimizer], bool], closure: object) -> bool:
        if closure is not None:
            raise UsageError(
                f"{type(self.optimizer).__name__}.step got a closure, but SpikePolicy looks at gradients before the "
                "step. Call step() without a closure, or remove the policy."
            )
        if self._scaler is not None:
            self._scaler.unscale(self.optimizer)
        self._ran, self._found_inf = may_step(self.optimizer), None
        if not self._ran and self._scaler is not None:
            self._scaler.skip(self.optimizer)
        return self._ran

    def _clip(self, most: float) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        others = self._other_stages() if self._other_stages is not None else None
        norm = clip_norm(parameters, most, norm_type=2.0, window_ended=True, others=others)
        if self._after_clip is not None:
            self._after_clip(norm)

    def _clipping_after(self, closure: Callable[[], object]) -> Callable[[], Any]:
        most = self._clip_norm
        if most is None:
            return closure

        def compute_and_clip() -> object:
            loss = closure()
            self._clip(most)
            return loss

        return compute_and_clip

    def _note_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        # Fused optimizers are always called and get the verdict as ``found_inf``.
        self._ran, self._found_inf = True, getattr(optimizer, "found_inf", None)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16; None with other precisions. To scale by another one, set it between two steps."""
        return None if self._scaler is None else self._scaler.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        scale_by(scaler, self._scaler)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last ``step`` was skipped, because of infinite or NaN fp16 gradients, or by a policy."""
        return not self._ran or (self._found_inf is not None and bool(self._found_inf.item()))

    @property
    def skipped(self) -> bool:
        """The same as ``step_was_skipped``."""
        return self.step_was_skipped

    def train(self) -> None:
        """Switch an optimizer that has modes, such as a schedule-free one, to training. Others do nothing.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            optimizer.train()  # a schedule-free optimizer's weights for training; SGD has no modes
            ```
        """
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """Switch an optimizer that has modes to evaluation. Others do nothing.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            optimizer.eval()  # a schedule-free optimizer's averaged weights; SGD has no modes
            ```
        """
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    def __repr__(self) -> str:
        return repr(self.optimizer)
