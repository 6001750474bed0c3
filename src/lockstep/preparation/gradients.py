"""Gradients of the prepared models: what brings and averages them, and what is looked at before a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lockstep.comm.dtensor import is_dtensor
from lockstep.errors import UsageError
from lockstep.model.changes import UncopiedHook
from lockstep.observe.damage.checks import DamageWatch
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.preparation.backward_watch import BackwardWatch
from lockstep.preparation.checks import check_called, refuse_inside
from lockstep.preparation.shards import ParameterRegistry
from lockstep.runtime.clock import StepClock
from lockstep.runtime.step import StepState
from lockstep.torch_internals.autograd import at_end_of_backward
from lockstep.torch_internals.dtensor_operators import keep_plain_gradients

TWICE = ("differentiate twice", "has no attribute 'placements'")
"""Pieces of what torch says of the gradient of a gradient."""


class Gradients:
    """Belongs to one ``Accelerator``; iterates over the tensors in which this rank accumulates gradients now.

    Args:
        models: The prepared ones: a list that grows.
        shards: Which parameters took the places of which.
        scales_loss: Losses are scaled, as with fp16.
        damage: Looks for damage in each backward, if that is asked for.
        ranks_step_together: Whether all ranks make this step with averaged gradients, unlike in asynchronous training.
        clock: Learns when averages are waited for.
    """

    def __init__(
        self,
        models: list[ParallelModel],
        shards: ParameterRegistry,
        step: StepState,
        world_size: int,
        scales_loss: bool,
        damage: DamageWatch | None,
        ranks_step_together: Callable[[], bool],
        clock: StepClock,
    ) -> None:
        self._models = models
        self._step = step
        self._clock = clock
        self._shards = shards
        self._world_size = world_size
        self._damage = damage
        self._ranks_step_together = ranks_step_together
        self._forward_seen = False
        self._own = OwnGradients(step, self._own_gradients)
        self.watch = BackwardWatch(
            step,
            scales_loss,
            world_size,
            self.__iter__,
            self._average,
        )

    def __iter__(self) -> Iterator[torch.Tensor]:
        for model in self._models:
            yield from model.gradients()

    def add(self, model: nn.Module, is_trained: bool) -> None:
        """Notice that this model is called, and if it is trained each backward through what it returns."""
        if is_trained:
            self.watch.add(model)
        if not self._forward_seen:
            FirstForward(model, self._forward_was_seen)

    def check_backward(self, loss: torch.Tensor) -> None:
        """See ``checks.check_called``; also raise UsageError for gradients that were changed inside of a window, or for
        batches that were skipped twice.
        """
        if any(model.is_summoned for model in self._models):
            refuse_inside("backward was called")
        # Stages of a pipeline that compute no loss have a placeholder.
        if not getattr(loss, "requires_grad", False) and not any(
            one.runs_micro_batches for one in self._models
        ):
            raise UsageError(
                f"backward got a {type(loss).__name__} without a gradient: it was computed under torch.no_grad(), was "
                "detached, is a plain number (.item()), or all parameters are frozen. Compute the loss from the output "
                "of the prepared model, without these."
            )
        self._step.trains()
        if not self._forward_seen and self._world_size > 1:
            check_called(self._models, self._world_size, loss)
        self._own.before_backward()

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """Run ``loss.backward`` of a 0-d loss, and average what torch's engines leave to us."""
        if type(loss) is not torch.Tensor and is_dtensor(loss):  # of sharded parameters, such as their norm
            keep_plain_gradients(loss)
        elif hasattr(loss, "fake_mode"):
            # Here, because few runs need it.
            from lockstep.parallel.pipeline.absent import check_values

            check_values([loss])
        for model in self._models:
            model.backward_begins(loss)
        waits = (
            loss.register_hook(self._await_averages)
            if self._world_size > 1 and self._waits_at_end()
            else None
        )
        try:
            if self._damage is None:
                self.watch.backward(partial(loss.backward, **kwargs))
            else:
                with self._damage.backward(loss):
                    self.watch.backward(partial(loss.backward, **kwargs))
        except BaseException as error:
            self._shards.recover()
            if isinstance(error, RuntimeError) and "for storage of size 0" in str(error):
                raise UsageError(
                    f"This backward needs weights of a sharded model (parallel='{self._shards.parallel}') that "
                    "were freed after an earlier backward through the same graph. This happens with a gradient "
                    "of a gradient (create_graph=True), or a second backward with retain_graph=True that begins "
                    "inside the model. Add up the losses and call backward once, compute the inner gradient "
                    "inside of the model's forward, or use parallel='ddp'."
                ) from error
            if "selective activation checkpoint has been mutated" in str(error):
                raise UsageError(
                    "A block writes into a result that activation=selective keeps, as ReLU(inplace=True) behind a "
                    "layer, or an RNN. Write inplace=False, or use activation=full."
                ) from error
            if any(piece in str(error) for piece in TWICE):
                raise UsageError(
                    f"This backward goes twice through layers that are split over ranks "
                    f"(parallel='{self._shards.parallel}'): the loss has a gradient in it (create_graph=True), such as "
                    "a gradient penalty, and split layers have no gradient of a gradient. Use parallel='ddp', or "
                    "take the difference of two forwards in its place."
                ) from error
            raise
        finally:
            if waits is not None:
                waits.remove()
        if self._world_size > 1:
            self._clock.enter("communication")
        for model in self._models:
            model.reduce_gradients()
        if self._world_size > 1 and self._ranks_step_together():
            self._own.after_backward()

    def _waits_at_end(self) -> bool:
        """Return whether what follows a backward's last gradient is DDP's wait for averages."""
        return any(model.averages_in_backward for model in self._models)

    def _await_averages(self, _: torch.Tensor) -> None:
        # Called before DDP asks for its own end, so that this comes first.
        at_end_of_backward(self._wait_begins)

    def _wait_begins(self) -> None:
        self._clock.enter("communication")

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Raise UsageError where a step would go wrong: by gradients that are not averages, or on summoned weights."""
        if any(model.is_summoned for model in self._models):
            refuse_inside("An optimizer steps")
        # Where a plain loss.backward() came before.
        self._step.trains()
        is_checked = not has_closure and self._ranks_step_together()
        for model in self._models:
            # Damage checks name the ranks whose copies differ.
            model.check_gradients(optimizer if is_checked else None, compares_copies=self._damage is None)
        self.watch.before_step(has_closure)

    def forget(self) -> None:
        """Others take the place of what there was."""
        self._own.forget()

    def clear(self) -> None:
        """Forget what was seen."""
        self._forward_seen = False
        self.watch.clear()
        self._own.forget()

    def _average(self) -> None:
        for model in self._models:
            model.reduce_gradients()

    def _own_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, model in enumerate(self._models):
            for name, gradient in model.own_gradients():
                yield name if len(self._models) == 1 else f"{name} of model {number}", gradient

    def _forward_was_seen(self) -> None:
        self._forward_seen = True


class FirstForward(UncopiedHook):
    """A forward pre-hook that calls ``tell`` once."""

    def __init__(self, model: nn.Module, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._handle: RemovableHandle | None = model.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: object) -> None:
        self._tell()
        if self._handle is not None:
            self._handle.remove()


class OwnGradients:
    """Gradients of the first accumulation window that a script changes: they are each rank's own, not averaged yet.

    One process would change their sum over all rows. So a norm to clip by, a sign or a limit is another number here,
    and what comes out is not what one process gets. Later windows are not looked at.

    Args:
        gradients: (name, gradient) of each parameter whose gradient is this rank's own until the window ends.
    """

    def __init__(self, step: StepState, gradients: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        self._step = step
        self._gradients = gradients
        self._left: dict[str, torch.Tensor] = {}
        self._is_over = False

    def forget(self) -> None:
        """Let others take the place of what there was."""
        self._left.clear()

    def after_backward(self) -> None:
        """Remember what this backward has left inside of the window."""
        is_inside = self._step.is_in_window and not self._step.sync_gradients
        self._is_over = self._is_over or (bool(self._left) and not is_inside)
        self.forget()
        if is_inside and not self._is_over:
            self._left = {name: _sums(gradient) for name, gradient in self._gradients()}

    def before_backward(self) -> None:
        """Raise UsageError if a gradient was changed since. One may be set to None: that is right on its own."""
        for name, gradient in self._gradients() if self._left else ():
            if name in self._left and not torch.equal(_sums(gradient), self._left[name]):
                self.forget()
                raise UsageError(
                    f"The gradient of '{name}' was changed inside an accumulation window, where it is the gradient "
                    "of this rank only. One process would change the sum over the rows of all ranks. Change "
                    "gradients where accelerator.sync_gradients is true, after the last backward of the window. "
                    "accelerator.clip_grad_norm_() and clip_grad_value_() do so."
                )


@torch.no_grad()
def _sums(gradient: torch.Tensor) -> torch.Tensor:
    values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    # NaN is not equal to itself, and would look like a change.
    return torch.stack([values.sum(), values.abs().sum()]).nan_to_num()
