"""Where a policy for spikes meets the loop: what it is asked before a step, and what it is told of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.optim import Optimizer

from lockstep.comm.collectives import Communicator
from lockstep.config.spikes import SpikePolicy
from lockstep.errors import UsageError
from lockstep.observe.measures.measures import Measures
from lockstep.observe.run_observer import RunObserver
from lockstep.observe.spikes.bad_step import KeepsSteps
from lockstep.observe.spikes.watch import SpikeWatch
from lockstep.runtime.clock import StepClock
from lockstep.train.clipping import OtherStages, clip_norm
from lockstep.train.loss_scale import LossScaler


def watch_spikes(
    policy: SpikePolicy | None,
    communicator: Communicator,
    ranks_step_together: Callable[[], bool],
    measures: Measures,
    clock: StepClock,
    keeper: Callable[[SpikePolicy], KeepsSteps],
) -> SpikeWatch | None:
    """Return what follows the policy; None: there is none. ``keeper`` makes what keeps steps."""
    if policy is None:
        return None
    tell, kept = partial(clock.news, "spike"), keeper(policy) if policy.capsules else None
    return SpikeWatch(policy, communicator, ranks_step_together, lambda: measures.open_samples, tell, kept)


def refuse_second_optimizer(optimizer: Optimizer) -> None:
    """Losses cannot be told apart by the optimizers that step on their gradients."""
    raise UsageError(
        f"SpikePolicy follows the steps of one optimizer, but a second one ({type(optimizer).__name__}) was "
        "prepared. Give all parameters to one optimizer, in groups, or remove the policy."
    )


def asked_before_step(
    spikes: SpikeWatch | None, others: Callable[[], OtherStages | None], scaler: LossScaler | None
) -> Callable[[Optimizer], bool] | None:
    """Return whether an optimizer may step. ``others``: who else holds parameters of the same models."""
    refusing = [observer for observer in RunObserver.registered if observer.refuses_steps]
    if refusing:
        return lambda optimizer: all(observer.may_step(optimizer) for observer in refusing)
    if spikes is None:
        return None

    def may_step(optimizer: Optimizer) -> bool:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def norm() -> torch.Tensor:
            return clip_norm(parameters, math.inf, 2.0, window_ended=False, others=others())

        return spikes.may_step(norm, None if scaler is None else scaler.scaler.get_scale)

    return may_step


def notifies_of_clearing(
    spikes: SpikeWatch | None, clear_further: Callable[[], None] | None
) -> Callable[[], None] | None:
    """Return what is called when gradients are cleared."""
    if spikes is None or clear_further is None:
        return clear_further if spikes is None else spikes.forget

    def cleared() -> None:
        spikes.forget()
        clear_further()

    return cleared
