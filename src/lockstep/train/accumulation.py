"""When gradients are averaged over the ranks, and by what a loss is divided."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.comm.tree import StateDict
from lockstep.errors import CheckpointError, UsageError
from lockstep.model.changes import attributes_set
from lockstep.runtime.process import Runtime
from lockstep.runtime.step import StepState

if TYPE_CHECKING:
    from lockstep.train.weighting import WeightedMean

NoSync = Callable[[nn.Module, bool], AbstractContextManager[Any]]
"""(model, inside a window) -> a context in which backward does not average over the ranks."""


class _LastStep:
    """The number of backward calls before the last step of an optimizer: a hook behind its steps."""

    # An offloaded step need not be over for it.
    reads_no_parameter = True

    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulation = weakref.ref(accumulation)
        self.backwards = -1

    def __call__(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        accumulation = self._accumulation()
        if accumulation is not None:
            self.backwards = accumulation.backwards


class Accumulation:
    """Counts micro-batches into windows. Only the last backward of a window averages over the ranks.

    Args:
        no_sync: How a model does without averaging.
        agreed_divisor: See ``WeightedMean``.

    Attributes:
        backwards: Calls of ``backward`` so far.
        loss_factor: What the latest loss, or its weighted sum, was multiplied by; 0-d or a number.
    """

    def __init__(
        self, step: StepState, runtime: Runtime, no_sync: NoSync, agreed_divisor: bool = False
    ) -> None:
        self._step = step
        self._no_sync = no_sync
        self._runtime = runtime
        self._agreed_divisor = agreed_divisor
        self._weighted_mean: WeightedMean | None = None
        self._inputs_are_uneven = False
        self._unsynchronised = 0
        self._is_alone = False
        self._window_is_weighted: bool | None = None
        # Micro-batches of a window that the end of the loader has cut short.
        self._cut_short: int | None = None
        self.backwards = 0
        self.loss_factor: torch.Tensor | float = 1.0
        # optimizer -> its ``_LastStep``
        self._last_steps: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def watch(self, optimizer: Optimizer) -> None:
        """Take note of when an optimizer steps, for ``has_stepped``."""
        if optimizer not in self._last_steps:
            last = self._last_steps[optimizer] = _LastStep(self)
            optimizer.register_step_post_hook(last)

    def has_stepped(self, optimizer: Optimizer) -> bool:
        """Return whether a watched optimizer has stepped since the last backward, so that its gradients are used up.

        False where that is not known: in scripts that never call ``Accelerator.backward``.
        """
        last: _LastStep | None = self._last_steps.get(optimizer)
        return last is not None and 0 < self.backwards == last.backwards

    def ranks_step_together(self) -> bool:
        """Return whether every rank makes the next step, on the same gradients."""
        return not self._is_alone and not self._inputs_are_uneven

    @contextmanager
    def accumulate(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Surround one micro-batch: set ``sync_gradients``, and hold back averaging inside a window.

        Raises:
            UsageError: windows of several micro-batches where ranks may end in the middle of one.
        """
        step = self._step
        if self._inputs_are_uneven and step.accumulation_steps > 1 and self._runtime.world_size > 1:
            raise UsageError(
                f"accumulate with {step.accumulation_steps} steps was used inside join_uneven_inputs, where "
                "ranks that end earlier would average gradients while the others are in the middle of a window. "
                "Set gradient_accumulation_steps to 1, or use even batches and accelerator.sample_weights()."
            )
        self._step.backward_calls = 0
        # The last batch of an epoch ends its window, full or not, and the next window counts from zero.
        ends = step.sync_with_dataloader and step.end_of_data
        done = step.micro_batch % step.window_length + 1
        self._cut_short = done if ends and done < step.window_length else None
        step.micro_batch = 0 if ends else step.micro_batch + 1
        step.sync_gradients = ends or step.micro_batch % step.window_length == 0
        step.is_in_window = True
        try:
            if step.sync_gradients or step.sync_each_batch:
                yield
                return
            with self._in_no_sync(models, inside_window=True):
                yield
        finally:
            step.is_in_window = False
            self._cut_short = None

    def no_sync(self, models: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Backward inside adds to each rank's own gradients, without averaging."""
        return self._in_no_sync(models, inside_window=False)

    @contextmanager
    def alone(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Let each rank train by itself inside: nothing is averaged, and windows end as ever."""
        with ExitStack() as stack:
            stack.enter_context(attributes_set(self, _is_alone=True))
            for model in models:
                stack.enter_context(self._no_sync(model, False))
            yield

    @contextmanager
    def _in_no_sync(self, models: Iterable[nn.Module], inside_window: bool) -> Iterator[None]:
        models = tuple(models)
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(self._no_sync(model, inside_window))
            # Without models the backward inside averages as ever.
            if not models:
                yield
                return
            self._unsynchronised += 1
            try:
                yield
            finally:
                self._unsynchronised -= 1

    def scale(
        self, loss: torch.Tensor, weight: torch.Tensor | float | None, gradients: Iterable[torch.Tensor]
    ) -> torch.Tensor:
        """Return the loss to call backward on, 0-d: by weight, or divided by the number of accumulation steps.

        ``loss``: 0-d, or with ``weight`` of any shape. ``weight``: a number, or one for each element of ``loss``.

        Raises:
            UsageError: some micro-batches of one window have weights and others not, or a micro-batch of
                a longer window has several weighted losses.
        """
        last = self._step.sync_gradients and self._unsynchronised == 0
        weighted = weight is not None
        self._step.backward_calls += 1
        self.backwards += 1
        if weighted and self._step.window_length > 1 and self._step.backward_calls > 1 and not last:
            raise UsageError(
                "backward was called twice with a weight in one micro-batch of an accumulation window. Each "
                "loss is a mean with its own weight, and their gradients cannot be separated afterwards. Add up "
                "the losses and call backward once, or accumulate several losses without weights."
            )
        if self._window_is_weighted not in (None, weighted):
            raise UsageError(
                "Some backward calls of this accumulation window got a weight and others did not, so their "
                "gradients do not add up to one mean. Pass weight=... to all of them or to none."
            )
        # After the last backward of a window the next one may choose anew.
        self._window_is_weighted = None if last else weighted
        if weight is None:
            steps = self._cut_short or self._step.window_length
            if (self._cut_short or 0) > 1 and self._step.backward_calls == 1:
                from lockstep.train.weighting import rescale

                # The losses before were divided by the length of a whole window.
                rescale(gradients, torch.tensor(self._step.window_length / steps))
            self.loss_factor = 1 / steps
            return loss if steps == 1 else loss / steps
        if self._inputs_are_uneven and self._runtime.world_size > 1:
            raise UsageError(
                "backward got a weight inside join_uneven_inputs, where ranks that have run out of batches cannot "
                "take part in adding the weights up. Drop the weight, or use even batches and "
                "accelerator.sample_weights()."
            )
        mean = self._weighted_mean or self._new_mean()
        scaled = mean.scale(loss, weight, last, gradients, self._is_alone)
        self._weighted_mean = None if last else mean
        self.loss_factor = mean.factor
        return scaled

    def _new_mean(self) -> WeightedMean:
        # Imported here, because few runs weigh their losses.
        from lockstep.train.weighting import WeightedMean

        return WeightedMean(self._runtime, self._agreed_divisor)

    def reset(self) -> None:
        """Forget an unfinished window."""
        self._step.micro_batch = 0
        self._step.sync_gradients = True
        self._window_is_weighted = None
        self._weighted_mean = None

    def state_dict(self) -> StateDict:
        """Return where in its window this rank is."""
        step, mean = self._step, self._weighted_mean
        return {
            "micro_batch": step.micro_batch,
            "accumulation_steps": step.accumulation_steps,
            "sync_gradients": step.sync_gradients,
            "is_weighted": self._window_is_weighted,
            "agreed_divisor": self._agreed_divisor,
            "window_weight": None if mean is None else mean.window_weight,
            "divisor": None if mean is None else mean.divisor,
        }

    def check_state(self, state: dict[str, object]) -> None:
        """Raise CheckpointError if a window of another length is open in the state."""
        position, steps = _position(state), self._step.accumulation_steps
        if steps != state["accumulation_steps"] and position:
            raise CheckpointError(
                f"The checkpoint was saved after micro-batch {position} of {state['accumulation_steps']}, but "
                f"here gradient_accumulation_steps is {steps}. Set it to {state['accumulation_steps']}, or load a "
                "checkpoint that was saved at the end of a window."
            )

    def load_state_dict(self, state: StateDict) -> None:
        """Go on in the window in which this rank was."""
        step = self._step
        unchanged = state["accumulation_steps"] == step.accumulation_steps
        step.micro_batch = state["micro_batch"] if unchanged else 0
        step.sync_gradients = state["sync_gradients"]
        self._window_is_weighted = state["is_weighted"]
        self._weighted_mean = None
        if state["divisor"] is not None:
            self._weighted_mean = self._new_mean()
            self._weighted_mean.load_state_dict(state)
        for last in self._last_steps.values():
            # What was loaded waits for a step.
            last.backwards = -1

    def uneven_inputs(self) -> AbstractContextManager[None]:
        """Allow ranks to end earlier than others inside."""
        return attributes_set(self, _inputs_are_uneven=True)


def _position(state: StateDict) -> int:
    """Return the number of micro-batches in the open window; 0 outside of one."""
    return 0 if state["sync_gradients"] else state["micro_batch"] % state["accumulation_steps"]


@contextmanager
def trigger_sync(model: nn.Module) -> Iterator[None]:
    """Let backward average gradients inside, although the last forward ran in ``no_sync``."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        yield
        return
    with attributes_set(model, require_backward_grad_sync=True, require_forward_param_sync=True):
        # As a forward outside of no_sync would have done.
        model.reducer.prepare_for_backward([])
        yield
