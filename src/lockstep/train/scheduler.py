"""A learning-rate scheduler that follows its optimizer's real steps."""

from __future__ import annotations

import math
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.comm.tree import StateDict
from lockstep.runtime.step import StepState
from lockstep.torch_internals import optim as torch_optim
from lockstep.train.optimizer import PreparedOptimizer

SCHEDULERS = (LRScheduler, ReduceLROnPlateau)


class PreparedScheduler:
    """The scheduler that ``prepare`` returns. The user's own scheduler is ``.scheduler``.

    ``step`` does nothing before the last micro-batch of an accumulation window, or after a skipped fp16 step. A
    schedule for one process counts the batches of that process. In one step, the ranks use ``world_size`` such
    batches, so each step advances the schedule ``world_size`` times (once with ``split_batches``).

    Args:
        scheduler: The user's own scheduler.
        optimizers: The prepared optimizers. A step that one of them skips is not counted.
        step: The state of the current step.
        steps_per_call: The number of schedule steps that one call makes.
        step_with_optimizer: With False, each call is one plain ``scheduler.step``, whatever the optimizer does.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator

        accelerator = Accelerator()
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=4)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        accelerator.backward(model(torch.randn(8, 4)).square().mean())
        optimizer.step()
        scheduler.step()  # of 4 batches, two ranks have used two
        assert scheduler.get_last_lr() == [1 - accelerator.num_processes / 4]
        accelerator.print(scheduler.describe())
        scheduler.load_state_dict(scheduler.state_dict())
        ```
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: list[PreparedOptimizer],
        step: StepState,
        steps_per_call: int = 1,
        step_with_optimizer: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers
        self.gradient_state = step
        self.steps_per_call = steps_per_call
        self.step_with_optimizer = step_with_optimizer

    def __getattr__(self, name: str) -> Any:
        # While it is copied, it is not set yet.
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: object, **kwargs: object) -> None:
        """Advance the schedule if the optimizer has made a step.

        Args:
            args: Positional arguments of ``scheduler.step``, such as the metric of ``ReduceLROnPlateau``.
            kwargs: Keyword arguments of ``scheduler.step``.
        """
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler and torch_optim.counts_steps(self.scheduler):
                # torch warns of a scheduler that steps without its optimizer: keep its count right.
                torch_optim.count_step(self.scheduler)
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(self.steps_per_call):
            if self._has_steps_left():
                self.scheduler.step(*args, **kwargs)

    def _has_steps_left(self) -> bool:
        # OneCycleLR raises behind its last step, which is reached earlier with several steps a call.
        total = getattr(self.scheduler, "total_steps", None)
        return total is None or self.scheduler.last_epoch + 1 < total

    def state_dict(self) -> StateDict:
        """Return the state of the user's scheduler."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load ``state_dict`` into the user's scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each group of parameters."""
        return self.scheduler.get_last_lr()

    def describe(self) -> str:
        """Return a sentence that tells how fast the schedule advances and where it ends."""
        name = type(self.scheduler).__name__
        total = schedule_length(self.scheduler)
        end = (
            f" and ends after {math.ceil(total / self.steps_per_call)} optimizer steps (its length is {total})"
            if total
            else ""
        )
        return f"{name} advances {self.steps_per_call} times at each optimizer step{end}."


def schedule_length(scheduler: object) -> int | None:
    """Return the number of ``step`` calls after which the schedule is over, where its attributes tell."""
    for name in ("total_steps", "T_max", "total_iters"):
        value = getattr(scheduler, name, None)
        if isinstance(value, int) and value > 0:
            return value
    for function in getattr(scheduler, "lr_lambdas", []):
        keywords = getattr(function, "keywords", {})
        if isinstance(keywords.get("num_training_steps"), int):
            return int(keywords["num_training_steps"])
    return None
