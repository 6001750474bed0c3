"""Gradients that ``accelerator.backward`` did not make: by ``loss.backward()``, or set by hand.

A plain ``loss.backward()`` is right where ``accelerator.backward`` would do the same. Inside an accumulation window it
is not divided by the number of micro-batches, and with fp16 its loss is not scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.comm.dtensor import is_dtensor, local
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
        is_alike: Whether there are several ranks, and all have gradients of the same parameters.
        ranks_step_together: Whether all ranks make this step with averaged gradients, unlike in asynchronous training.
    """

    def __init__(
        self,
        step: StepState,
        scales_loss: bool,
        world_size: int,
        gradients: Callable[[], Iterator[torch.Tensor]],
        average: Callable[[], None],
        is_alike: bool = True,
        ranks_step_together: Callable[[], bool] = lambda: True,
    ) -> None:
        self._step = step
        self._scales_loss = scales_loss
        self._world_size = world_size
        self._gradients = gradients
        self._average = average
        self._is_alike = is_alike and world_size > 1
        self._together = ranks_step_together
        self._is_ours = False
        self._pass = -1
        self._backwards = 0
        self._ours = 0
        self._plain_in_window = 0
        self._plain_unscaled = 0
        # Optimizer -> backwards before its last step
        self._stepped: WeakIdKeyDictionary = WeakIdKeyDictionary()

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
        self._backwards += 1
        self._ours += 1

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
        for tensor in leaves(output).values():
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
        self._backwards += 1
        if self._step.is_in_window and self._step.accumulation_steps > 1:
            self._plain_in_window += 1
        if self._scales_loss:
            self._plain_unscaled += 1
        self._average()

    def _state(self) -> list[tuple[torch.Tensor, int]]:
        return [(gradient, version(gradient)) for gradient in self._gradients()]

    # At the step --------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Raise UsageError where a step would go wrong by gradients that ``accelerator.backward`` did not make."""
        if self._plain_in_window:
            count, self._plain_in_window = self._plain_in_window, 0
            raise UsageError(
                f"{count} of the gradients of this accumulation window were computed by loss.backward(), which "
                f"does not divide by gradient_accumulation_steps={self._step.accumulation_steps}. Call "
                "accelerator.backward(loss)."
            )
        if self._scales_loss and not has_closure and (self._plain_unscaled or not self._ours):
            self._plain_unscaled = 0
            raise UsageError(
                "With mixed_precision='fp16' losses are scaled, but gradients of this step were computed by "
                "loss.backward(), which does not scale the loss. Call accelerator.backward(loss)."
            )
        if self._is_alike and not has_closure and self._together():
            self._check_set_by_hand(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Remember which gradients a step has used."""
        self._stepped[optimizer] = self._backwards

    def _check_set_by_hand(self, optimizer: Optimizer) -> None:
        """Gradients without a backward since the last step: right if they are equal on all ranks, as means are."""
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        if self._stepped.get(optimizer, 0) != self._backwards or first is None:
            return
        # All ranks come here, also one that has no gradients, and all send as many numbers.
        digest = torch.zeros(3, dtype=torch.float64, device=local(first).device)
        for number, gradient in enumerate(_dense(optimizer), 1):
            wide = gradient.double()
            digest += torch.stack(
                [torch.ones_like(digest[0]), number * wide.sum(), number * wide.abs().sum()]
            )
        # One all-reduce for the largest and the smallest: min(x) = -max(-x).
        both = torch.cat([digest, -digest]).nan_to_num()
        dist.all_reduce(both, dist.ReduceOp.MAX)
        most, least = both.chunk(2)
        if not torch.equal(most, -least):
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called with gradients that accelerator.backward did not "
                "compute and that differ between the ranks: the script set p.grad, or called loss.backward() on what "
                "is no output of a prepared model. Call accelerator.backward(loss), or average the values: p.grad = "
                "accelerator.reduce(gradient, 'mean')."
            )


def _dense(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Gradients of parameters that every rank holds whole."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and not is_dtensor(gradient) and not gradient.is_sparse:
                yield gradient


class _OutputGradientHook(UncopiedHook):
    """A forward hook."""

    def __init__(self, watch: BackwardWatch) -> None:
        self._watch = watch

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        self._watch.after_forward(output)
