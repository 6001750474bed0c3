"""What ``prepare`` does with optimizers and schedulers, and what happens around their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lockstep.observe.damage.checks import DamageWatch
from lockstep.observe.log import get_logger
from lockstep.observe.run_observer import RunObserver
from lockstep.observe.spikes.watch import SpikeWatch
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.preparation.checks import PreparedObjects, check_trained
from lockstep.preparation.gradients import Gradients
from lockstep.preparation.run_context import RunContext
from lockstep.preparation.shards import ParameterRegistry
from lockstep.preparation.spikes import asked_before_step, notifies_of_clearing, refuse_second_optimizer
from lockstep.preparation.stepping import CheckedOptimizer
from lockstep.torch_internals import optim as torch_optim
from lockstep.torch_internals.optim import complete_optimizer
from lockstep.train.clipping import OtherStages, clip_norm
from lockstep.train.optimizer import PreparedOptimizer
from lockstep.train.scheduler import PreparedScheduler

if TYPE_CHECKING:
    from lockstep.preparation.offload import OffloadManager

logger = get_logger(__name__)


@dataclass(eq=False)
class OptimizerPreparation:
    """Prepares the optimizers and schedulers of one ``Accelerator``, and is the owner of the lists of them.

    Args:
        seen: What was prepared before, of any kind.
        registry: Which parameters took the places of which.
        models: The prepared ones: a list that grows.
        prepared: The optimizers that were prepared so far: a list that grows, and so is ``schedulers``.
        parameters_at_rest: All parameters of these models, where they are sharded not gathered.
    """

    run: RunContext
    seen: PreparedObjects
    registry: ParameterRegistry
    models: list[ParallelModel]
    prepared: list[PreparedOptimizer]
    gradients: Gradients
    parameters_at_rest: Callable[[], Iterable[torch.nn.Parameter]]
    offload: OffloadManager | None
    damage: DamageWatch | None
    spikes: SpikeWatch | None
    schedulers: list[PreparedScheduler] = field(default_factory=list)

    def prepare(self, optimizer: Optimizer) -> PreparedOptimizer:
        if self.seen.has_made(optimizer):
            assert isinstance(optimizer, PreparedOptimizer)
            return optimizer
        if self.spikes is not None and self.prepared:
            refuse_second_optimizer(optimizer)
        complete_optimizer(optimizer)
        torch_optim.probe()
        self.registry.add_optimizer(optimizer)
        kind = PreparedOptimizer if self.damage is None else partial(CheckedOptimizer, checks=self.damage)
        prepared = kind(
            optimizer,
            self.run.step,
            self.run.scaler,
            self._check_parameters,
            clip_norm=self.run.options.gradient_clipping,
            after_zero_grad=notifies_of_clearing(
                self.spikes,
                partial(self.registry.discard_unreduced, optimizer)
                if self.run.options.parallel.shards
                else None,
            ),
            other_stages=self.other_stages,
            before_step=self._before_step,
            after_clip=self._clipped,
            may_step=asked_before_step(self.spikes, self.other_stages, self.run.scaler),
        )
        self.seen.add(optimizer, prepared)
        self.prepared.append(prepared)
        for observer in RunObserver.registered:
            observer.optimizer_prepared(optimizer)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        if self.seen.has_made(scheduler):
            assert isinstance(scheduler, PreparedScheduler)
            return scheduler
        own = [o for o in self.prepared if scheduler.optimizer is o or scheduler.optimizer is o.optimizer]
        one_step_a_call = (
            self.run.options.loaders.split_batches
            or not self.run.step_scheduler_with_optimizer
            or getattr(scheduler, "counts_optimizer_steps", False)
        )
        prepared = PreparedScheduler(
            scheduler,
            own or self.prepared,
            self.run.step,
            steps_per_call=1 if one_step_a_call else self.run.meshes.data_size * self.run.step.virtual_ranks,
            step_with_optimizer=self.run.step_scheduler_with_optimizer,
        )
        if prepared.steps_per_call > 1:
            logger.warning(
                "%s Pass step_scheduler_with_optimizer=False to count its steps yourself.",
                prepared.describe(),
            )
        self.seen.add(scheduler, prepared)
        self.schedulers.append(prepared)
        return prepared

    def other_stages(self) -> OtherStages | None:
        """Return who else holds parameters of the prepared models; None: nobody."""
        group = self.run.meshes.stage_group
        if group is None:
            return None
        return OtherStages(group, set().union(*(model.counted_elsewhere() for model in self.models)))

    def clip_norm(
        self, parameters: list[torch.Tensor], max_norm: float, norm_type: float, window_ended: bool
    ) -> torch.Tensor:
        """See ``clipping.clip_norm``: over all ranks that hold parameters."""
        for observer in RunObserver.registered if window_ended else []:
            observer.before_clip()
        part = self.run.step.clock.enter("optimizer")
        in_files = self.offload is not None and self.offload.keeps_gradients
        others = None if self.run.meshes.axes.pp == 1 else self.other_stages()
        norm = clip_norm(parameters, max_norm, norm_type, window_ended, others, in_files)
        self.run.step.clock.enter(part)
        if window_ended:
            self._clipped(norm)
            if self.spikes is not None:
                self.spikes.clipped(norm)
        return norm

    def clear(self) -> None:
        """Forget all optimizers and schedulers."""
        self.prepared.clear()
        self.schedulers.clear()

    def _clipped(self, norm: torch.Tensor) -> None:
        self.run.measures.clipped(norm)
        for observer in RunObserver.registered:
            observer.clipped(norm)

    def _before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        self.gradients.before_step(optimizer, has_closure)
        for observer in RunObserver.registered if not has_closure else ():
            observer.before_clip()

    def _check_parameters(self, optimizer: Optimizer) -> None:
        if self.run.runtime.world_size > 1:
            check_trained(optimizer, self.parameters_at_rest())
        if self.offload is not None:
            self.offload.take_over(optimizer)
