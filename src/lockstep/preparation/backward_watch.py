"""Gradients that ``accelerator.backward`` did not make, but ``loss.backward()``.

A plain ``loss.backward()`` is right where ``accelerator.backward`` would do the same. Inside an accumulation window it
is not divided by the number of micro-batches, and with fp16 its loss is not scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from lockstep.comm.tree import leaves
from lockstep.errors import UsageError
from lockstep.model.changes import UncopiedHook
from lockstep.runtime.step import StepState
from lockstep.torch_internals.autograd import at_end_of_backward as at_end_of_pass
from lockstep.torch_internals.autograd import current_backward as current_pass
from lockstep.torch_internals.tensors import version


class BackwardWatch:
    """Belongs to one ``Accelerator``.

    Args:
        step: Its state; its ``is_in_window`` says whether a micro-batch of ``accumulate`` runs.
        scales_loss: Losses are scaled, as with fp16.
        world_size: Ranks over which gradients are averaged.
        gradients: The tensors in which this rank accumulates gradients now.
        average: Averages what torch's engines leave to us. Collective.
    """

    def __init__(
        self,
        step: StepState,
        scales_loss: bool,
        world_size: int,
        gradients: Callable[[], Iterator[torch.Tensor]],
        average: Callable[[], None],
    ) -> None:
        self._step = step
        self._scales_loss = scales_loss
        self._world_size = world_size
        self._gradients = gradients
        self._average = average
        self._is_ours = False
        self._pass = -1
        self._has_ours = False
        self._plain_in_window = 0
        self._plain_unscaled = 0

    def add(self, model: nn.Module) -> None:
        """Notice each backward through what this model returns."""
        model.register_forward_hook(_OutputGradientHook(self))

    def backward(self, call: Callable[[], None]) -> None:
        """Run a backward of the ``Accelerator``."""
        self._is_ours = True
        try:
            call()
        finally:
            self._is_ours = False
        self._has_ours = True

    def unnoticed(self, call: Callable[[], None]) -> None:
        """Run a backward of which nothing will be left."""
        self._is_ours = True
        try:
            call()
        finally:
            self._is_ours = False

    def clear(self) -> None:
        """Forget what was seen."""
        self._plain_in_window = self._plain_unscaled = 0

    # Backward calls of the script ---------------------------------------------------------------------

    def after_forward(self, output: object) -> None:
        """Notice when a gradient comes to these outputs."""
        if not torch.is_grad_enabled():
            return
        if self._world_size == 1 and self._step.accumulation_steps == 1 and not self._scales_loss:
            return  # nothing is averaged, divided or scaled
        for tensor in (output,) if isinstance(output, torch.Tensor) else leaves(output).values():
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._gradient_comes)

    def _gradient_comes(self, _: torch.Tensor) -> None:
        # One backward brings gradients to several outputs: the first of them counts.
        if self._is_ours or current_pass() == self._pass:
            return
        self._pass = current_pass()
        before = self._state()
        # After the callbacks of torch's engines, which are asked for later in the pass.
        at_end_of_pass(lambda: at_end_of_pass(partial(self._pass_ends, before)))

    def _pass_ends(self, before: list[tuple[torch.Tensor, int]]) -> None:
        after = self._state()
        if len(before) == len(after) and all(
            a is b and m == n for (a, m), (b, n) in zip(before, after, strict=True)
        ):
            return  # torch.autograd.grad, which leaves no gradients
        if self._step.is_in_window and self._step.accumulation_steps > 1:
            self._plain_in_window += 1
        if self._scales_loss:
            self._plain_unscaled += 1
        self._average()

    def _state(self) -> list[tuple[torch.Tensor, int]]:
        return [(gradient, version(gradient)) for gradient in self._gradients()]

    # At the step --------------------------------------------------------------------------------------

    def before_step(self, has_closure: bool) -> None:
        """Raise UsageError where a step would go wrong by gradients that ``accelerator.backward`` did not make."""
        if self._plain_in_window:
            count, self._plain_in_window = self._plain_in_window, 0
            raise UsageError(
                f"{count} of the gradients of this accumulation window were computed by loss.backward(), which "
                f"does not divide by gradient_accumulation_steps={self._step.accumulation_steps}. Call "
                "accelerator.backward(loss)."
            )
        if self._scales_loss and not has_closure and (self._plain_unscaled or not self._has_ours):
            self._plain_unscaled = 0
            raise UsageError(
                "With mixed_precision='fp16' losses are scaled, but gradients of this step were computed by "
                "loss.backward(), which does not scale the loss. Call accelerator.backward(loss)."
            )


class _OutputGradientHook(UncopiedHook):
    """A forward hook."""

    def __init__(self, watch: BackwardWatch) -> None:
        self._watch = watch

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        self._watch.after_forward(output)
