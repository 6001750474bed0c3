"""In which order ``prepare`` makes objects ready, and all that the loop asks of prepared ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.checkpoint.contents import CheckpointContents, DataCoordinates
from lockstep.config.readers import Placeholder
from lockstep.config.spikes import SpikePolicy
from lockstep.errors import ArgumentError
from lockstep.observe.damage.checks import DamageWatch
from lockstep.observe.run_observer import ObservedRun, RunObserver
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.preparation.capsules import StepKeeper, facts_of_run
from lockstep.preparation.checks import (
    PreparedObjects,
    refuse_lookalike,
    refuse_saves_of_parts,
    refuse_unknown_loader,
)
from lockstep.preparation.gradients import Gradients
from lockstep.preparation.loaders import LoaderPreparation
from lockstep.preparation.models import ModelPreparation
from lockstep.preparation.optimizers import OptimizerPreparation
from lockstep.preparation.run_context import RunContext
from lockstep.preparation.shards import ParameterRegistry
from lockstep.preparation.spikes import watch_spikes
from lockstep.preparation.stepping import StepChecks
from lockstep.preparation.verifications import Verifications
from lockstep.train.optimizer import PreparedOptimizer
from lockstep.train.scheduler import SCHEDULERS

if TYPE_CHECKING:
    from lockstep.preparation.offload import OffloadManager


class Preparation:
    """Prepares objects for one ``Accelerator``, and has all that the loop asks of prepared ones.

    Attributes:
        models, optimizers, loaders: What prepares objects of each kind, with the list of them as ``prepared``.
        registry: Which parameters took the places of which.
        gradients: Those of the prepared models.
        spikes: Follows a ``SpikePolicy``; None: there is none.
        verifications: Which models are compared with the whole ones.
    """

    def __init__(self, run: RunContext) -> None:
        options, step, is_scaled = run.options, run.step, run.scaler is not None
        replaces_parameters = options.parallel.replaces_parameters
        self._run = run
        # Lists that grow: what looks on has them from the beginning.
        models: list[ParallelModel] = []
        optimizers: list[PreparedOptimizer] = []
        self._seen = PreparedObjects()
        self.registry = ParameterRegistry(
            active=run.runtime.world_size > 1 and replaces_parameters,
            loss_is_scaled=is_scaled,
            parallel=options.parallel,
        )
        self._offload = _offload_manager(run)
        self._damage = _damage_watch(run, models)
        self._step_checks = StepChecks(
            step,
            replaces_parameters=replaces_parameters,
            is_scaled=is_scaled,
            is_replaced=self.registry.is_replaced,
            parameters=self.parameters_at_rest,
            optimizers=optimizers,
        )
        self.spikes = watch_spikes(
            options.spikes,
            run.communicator,
            run.ranks_step_together,
            run.measures,
            step.clock,
            partial(self._step_keeper, models),
        )
        self.gradients = Gradients(
            models,
            self.registry,
            step,
            run.runtime.world_size,
            scales_loss=is_scaled,
            damage=self._damage,
            ranks_step_together=run.ranks_step_together,
            clock=step.clock,
        )
        self.verifications = Verifications(run, self.registry.reshard, self.gradients.watch.unnoticed)
        self.models = ModelPreparation(
            run,
            self._seen,
            self.registry,
            models,
            optimizers,
            self.gradients,
            self.verifications,
            self._step_checks,
            self._offload,
        )
        self.optimizers = OptimizerPreparation(
            run,
            self._seen,
            self.registry,
            models,
            optimizers,
            self.gradients,
            self.parameters_at_rest,
            self._offload,
            self._damage,
            self.spikes,
        )
        self.loaders = LoaderPreparation(run)
        run.measures.optimizers_are(optimizers, run.meshes.axes)
        for observer in RunObserver.registered:
            observer.begins(ObservedRun(step, run.meshes, models, optimizers, self.parameters_at_rest))

    def _step_keeper(self, models: list[ParallelModel], policy: SpikePolicy) -> StepKeeper:
        run, options = self._run, self._run.options

        def facts() -> dict[str, Any]:
            scale = None if run.scaler is None else run.scaler.scaler.get_scale()
            known = {"epoch": run.measures.epoch, "loss_scale": scale}
            return {**known, **facts_of_run(options, run.step, run.runtime)}

        return StepKeeper(
            policy,
            run.communicator,
            run.meshes,
            run.step,
            models,
            lambda: len(self.loaders.prepared),
            lambda: self.contents({}),
            run.measures.settled_folder,
            facts,
        )

    def change_options(self, **changes: Any) -> None:
        """Have other options for what is prepared from now on."""
        self._run.options = replace(self._run.options, **changes)

    def prepare(
        self, objects: tuple[object, ...], device_placement: list[bool | None] | None
    ) -> list[object]:
        """Return the prepared forms, in the order given; objects of other types pass through.

        Raises:
            UsageError: an object was prepared before, or ``device_placement`` has another length.
        """
        placement = device_placement or [None] * len(objects)
        if len(placement) != len(objects):
            raise ArgumentError(
                f"prepare got {len(objects)} objects and {len(placement)} values of device_placement. "
                "Pass one value for each object."
            )
        if self._run.runtime.world_size > 1 and self._run.options.parallel.replaces_parameters:
            refuse_saves_of_parts(self._run.options.parallel)
            for item in objects:
                refuse_lookalike(item)
        for item in objects:
            refuse_unknown_loader(item, self._run.meshes.data_size)
        objects = self._with_described(objects)
        prepared = list(objects)
        # Models first, because optimizers are checked against them; schedulers last, they follow optimizers.
        makers: tuple[tuple[Any, Callable[[Any, bool | None], object]], ...] = (
            (nn.Module, self.models.prepare),
            (Optimizer, lambda optimizer, _: self.optimizers.prepare(optimizer)),
            (DataLoader, self.loaders.prepare),
            (SCHEDULERS, lambda scheduler, _: self.optimizers.prepare_scheduler(scheduler)),
        )
        for kind, make in makers:
            for i, item in enumerate(objects):
                if isinstance(item, kind):
                    prepared[i] = make(item, placement[i])
        if getattr(self._run.options.parallelism_config, "sp_enabled", False):
            self.loaders.shard_sequences(prepared)
        return prepared

    def _with_described(self, objects: tuple[object, ...]) -> tuple[object, ...]:
        """Return the objects, with what a configuration describes in place of what stands for it."""
        options = self._run.options
        if (options.optimizer, options.scheduler) == (None, None) and not any(
            isinstance(item, Placeholder) for item in objects
        ):
            return objects
        from lockstep.compat.deepspeed.described import build_described

        return build_described(objects, options, self._run.meshes.data_size)

    def finish_steps(self) -> None:
        """Wait for steps of optimizers that go on in other threads. Raises what went wrong in them."""
        if self._offload is not None:
            self._offload.finish()

    def contents(self, further: dict[str, list[object]]) -> CheckpointContents:
        """Return what a checkpoint is made of: the prepared objects and ``further`` ones."""
        self.finish_steps()
        meshes, place = self._run.meshes, None
        if meshes.axes.splits_model:
            place = DataCoordinates(
                meshes.data_rank, meshes.data_size, meshes.gradient_rank, meshes.gradient_size
            )
        return CheckpointContents(
            models=[model.plain for model in self.models.prepared],
            parts={
                "optimizer": list(self.optimizers.prepared),
                "scheduler": list(self.optimizers.schedulers),
                "loader": list(self.loaders.prepared),
                "scaler": [] if self._run.scaler is None else [self._run.scaler],
                **further,
            },
            place=place,
            whole=self.models.wholes,
            keep_waiting=self.loaders.keep_waiting,
        )

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield all parameters of the prepared models."""
        for model in self.models.prepared:
            yield from model.parameters()

    def clear(self) -> None:
        """Forget all prepared objects."""
        self._run.measures.clear()
        if self._offload is not None:
            self._offload.clear()
        self._seen.clear()
        self.registry.clear()
        self._step_checks.stop()
        self.verifications.clear()
        self.gradients.clear()
        if self._run.scaler is not None:
            self._run.scaler.clear()
        if self._damage is not None:
            self._damage.clear()
        if self.spikes is not None:
            self.spikes.load_state_dict(None)
        self.models.clear()
        self.optimizers.clear()
        self.loaders.clear()

    def parameters_at_rest(self) -> Iterator[torch.nn.Parameter]:
        """Return all parameters of the prepared models, where they are sharded not gathered."""
        self.registry.reshard()
        return self.parameters()


def _offload_manager(run: RunContext) -> OffloadManager | None:
    """Return what brings state that is kept outside of the device; None: none is."""
    if not run.options.parallel.offloads_optimizer:
        return None
    # Here, because few runs need it.
    from lockstep.preparation.offload import OffloadManager

    return OffloadManager(run.options.parallel, run.runtime.device, run.communicator)


def _damage_watch(run: RunContext, models: list[ParallelModel]) -> DamageWatch | None:
    """Return what looks for silent damage; None: nobody asked for it."""
    if not run.options.damage.are_on:
        return None
    return DamageWatch(
        run.options.damage,
        run.communicator,
        models,
        run.ranks_step_together,
        lambda sentence: run.step.clock.news("damage", sentence=sentence),
    )
