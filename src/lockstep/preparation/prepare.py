"""What ``prepare`` does with each object, and what it remembers of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.checkpoint.contents import CheckpointContents, DataCoordinates, FullModelSpec, ties_of
from lockstep.comm.collectives import Communicator
from lockstep.config.options import Options
from lockstep.config.readers import Placeholder
from lockstep.config.spikes import SpikePolicy
from lockstep.data.loader import PreparedLoader
from lockstep.data.prepare import prepare_loader
from lockstep.errors import ArgumentError, UsageError
from lockstep.observe.damage.checks import DamageWatch
from lockstep.observe.log import get_logger
from lockstep.observe.measures.measures import Measures
from lockstep.parallel.materialize import InitWeights
from lockstep.parallel.parallel_model import ParallelModel, PipelinedModel
from lockstep.parallel.parallelize import parallelize
from lockstep.parallel.steps import ModelOptions
from lockstep.preparation.backward_watch import BackwardWatch
from lockstep.preparation.capsules import StepKeeper, facts_of_run
from lockstep.preparation.checks import (
    PreparedObjects,
    check_micro_batch,
    check_trained,
    refuse_lookalike,
    refuse_offloaded_quantized,
    refuse_replicas,
)
from lockstep.preparation.gradients import Gradients
from lockstep.preparation.observers import ObservedRun, RunObserver
from lockstep.preparation.shards import ParameterRegistry
from lockstep.preparation.spikes import (
    asked_before_step,
    notifies_of_clearing,
    refuse_second_optimizer,
    watch_spikes,
)
from lockstep.preparation.stepping import CheckedOptimizer, DrawsAlike, StepChecks
from lockstep.preparation.verifications import Verifications
from lockstep.runtime.mesh import DeviceMeshes
from lockstep.runtime.process import Runtime
from lockstep.runtime.step import StepState
from lockstep.torch_internals import optim as torch_optim
from lockstep.torch_internals.optim import complete_optimizer
from lockstep.train.clipping import OtherStages, clip_norm
from lockstep.train.loss_scale import LossScaler
from lockstep.train.optimizer import PreparedOptimizer
from lockstep.train.scheduler import SCHEDULERS, PreparedScheduler

if TYPE_CHECKING:
    from lockstep.preparation.offload import OffloadManager

logger = get_logger(__name__)


class Preparation:
    """Prepares objects for one ``Accelerator`` and is the owner of the lists of them."""

    def __init__(
        self,
        options: Options,
        runtime: Runtime,
        meshes: DeviceMeshes,
        step: StepState,
        communicator: Communicator,
        scaler: LossScaler | None,
        rng_types: list[str] | None,
        device_placement: bool,
        step_scheduler_with_optimizer: bool,
        ranks_step_together: Callable[[], bool],
        measures: Measures,
    ) -> None:
        self._options = options
        self._runtime = runtime
        self._meshes = meshes
        self._step = step
        self._communicator = communicator
        self._scaler = scaler
        self._rng_types = rng_types
        self._device_placement = device_placement
        self._step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self._seen = PreparedObjects()
        self.registry = ParameterRegistry(
            active=runtime.world_size > 1 and options.parallel.replaces_parameters,
            loss_is_scaled=scaler is not None,
            parallel=options.parallel,
        )
        self._offload: OffloadManager | None = None
        if options.parallel.offloads_optimizer:
            from lockstep.preparation.offload import OffloadManager  # with what few runs need

            self._offload = OffloadManager(options.parallel, runtime.device, communicator)
        self._wholes: dict[int, FullModelSpec] = {}
        self.models: list[ParallelModel] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        self._measures = measures
        measures.optimizers_are(self.optimizers, meshes.axes)
        self._sharded_loaders: dict[int, PreparedLoader] = {}
        self._step_checks = StepChecks(
            step,
            replaces_parameters=options.parallel.replaces_parameters,
            is_scaled=scaler is not None,
            is_replaced=self.registry.is_replaced,
            parameters=self.parameters_at_rest,
            optimizers=self.optimizers,
        )
        self._draws = DrawsAlike(communicator, ranks_step_together)
        self._damage = (
            DamageWatch(
                options.damage,
                communicator,
                self.models,
                ranks_step_together,
                lambda sentence: step.clock.news("damage", sentence=sentence),
            )
            if options.damage.are_on
            else None
        )
        self.spikes = watch_spikes(
            options.spikes, communicator, ranks_step_together, measures, step.clock, self._step_keeper
        )
        self.gradients = Gradients(
            self.models,
            self.registry,
            step,
            runtime.world_size,
            scales_loss=scaler is not None,
            damage=self._damage,
            ranks_step_together=ranks_step_together,
            clock=step.clock,
        )
        self.verifications = Verifications(
            options, runtime, meshes, communicator, self.registry.reshard, self.gradients.watch.unnoticed
        )
        for observer in RunObserver.registered:
            observer.begins(ObservedRun(step, meshes, self.models, self.optimizers, self.parameters_at_rest))

    def _step_keeper(self, policy: SpikePolicy) -> StepKeeper:
        scaler, options = self._scaler, self._options

        def facts() -> dict[str, Any]:
            scale = None if scaler is None else scaler.scaler.get_scale()
            known = {"epoch": self._measures.epoch, "loss_scale": scale}
            return {**known, **facts_of_run(options, self._step, self._runtime)}

        return StepKeeper(
            policy,
            self._communicator,
            self._meshes,
            self._step,
            self.models,
            lambda: len(self.loaders),
            lambda: self.contents({}),
            self._measures.settled_folder,
            facts,
        )

    def change_options(self, **changes: Any) -> None:
        """Have other options for what is prepared from now on."""
        self._options = replace(self._options, **changes)

    def prepare(
        self, objects: tuple[object, ...], device_placement: list[bool | None] | None
    ) -> list[object]:
        """The prepared forms, in the order given; objects of other types pass through.

        Raises:
            UsageError: an object was prepared before, or ``device_placement`` has another length.
        """
        placement = device_placement or [None] * len(objects)
        if len(placement) != len(objects):
            raise ArgumentError(
                f"prepare got {len(objects)} objects and {len(placement)} values of device_placement. "
                "Pass one value for each object."
            )
        if self._runtime.world_size > 1 and self._options.parallel.replaces_parameters:
            for item in objects:
                refuse_lookalike(item)
        objects = self._with_described(objects)
        prepared = list(objects)
        # Models first, because optimizers are checked against them; schedulers last, they follow optimizers.
        makers: tuple[tuple[Any, Callable[[Any, bool | None], object]], ...] = (
            (nn.Module, self.prepare_model),
            (Optimizer, lambda optimizer, _: self.prepare_optimizer(optimizer)),
            (DataLoader, self.prepare_loader),
            (SCHEDULERS, lambda scheduler, _: self.prepare_scheduler(scheduler)),
        )
        for kind, make in makers:
            for i, item in enumerate(objects):
                if isinstance(item, kind):
                    prepared[i] = make(item, placement[i])
        if getattr(self._options.parallelism_config, "sp_enabled", False):
            self._shard_sequences(prepared)
        return prepared

    def _shard_sequences(self, prepared: list[object]) -> None:
        """As DeepSpeed does for loaders that are prepared together with a model."""
        from lockstep.parallel.context.sharded_loader import shard_sequences

        models = [item for item in prepared if isinstance(item, nn.Module)]
        for loader in prepared if models else ():
            if isinstance(loader, PreparedLoader) and id(loader) not in self._sharded_loaders:
                self._sharded_loaders[id(loader)] = loader
                loader.around = shard_sequences(models, loader.around)

    def gives_chunks(self, loader: object) -> bool:
        """Whether a loader gives chunks of the sequence."""
        return id(loader) in self._sharded_loaders

    def _with_described(self, objects: tuple[object, ...]) -> tuple[object, ...]:
        """The objects, with what a configuration describes in place of what stands for it."""
        options = self._options
        if (options.optimizer, options.scheduler) == (None, None) and not any(
            isinstance(item, Placeholder) for item in objects
        ):
            return objects
        from lockstep.compat.deepspeed.described import build_described

        return build_described(objects, options, self._meshes.data_size)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        init_weights: InitWeights | None = None,
    ) -> nn.Module:
        if self._seen.has_made(model):
            return model
        refuse_replicas(model)
        refuse_offloaded_quantized(model)
        self.registry.refuse_shared_parameters(model)
        options = self._options
        if self._offload is not None:
            self._offload.check_budget(model, self._meshes.axes.shard)
        whole = _full_model_spec(model) if self._meshes.axes.pp > 1 else None
        before = dict(model.named_parameters(remove_duplicate=False))
        self.registry.note_storages(before.values())
        prepared = parallelize(
            model,
            self._runtime,
            ModelOptions(
                meshes=self._meshes,
                parallel=options.parallel,
                mixed_precision=options.mixed_precision,
                autocast=options.autocast,
                fp8=options.fp8,
                ddp=options.ddp,
                compile_options=options.compile_options,
                compile_blocks=options.compile_blocks,
                init_weights=init_weights,
                loss_scale=None if self._scaler is None else self._scaler.scaler.get_scale,
            ),
            device_placement=self._device_placement if device_placement is None else device_placement,
            evaluation_mode=evaluation_mode,
            before_split=lambda: None if evaluation_mode else self.verifications.before_split(model),
        )
        if not evaluation_mode:
            self.verifications.watch(prepared)
        until_settled = [self._take_over(prepared, before)]  # not longer: it would keep what this rank drops
        if isinstance(prepared, PipelinedModel):
            pipeline: Any = prepared.module
            pipeline.on_settled(lambda: self._take_over(prepared, until_settled.pop()))
        if self._offload is not None:
            self._offload.add_model(prepared)
        self.gradients.add(prepared.module, is_trained=not evaluation_mode)
        # Not before: what was refused may be mended and prepared again.
        self._seen.add(model, prepared.module)
        if self._runtime.world_size > 1 and not evaluation_mode:
            self._step_checks.start()
        if whole is not None:
            self._wholes[len(self.models)] = whole
        self.models.append(prepared)
        if not evaluation_mode:
            self._measures.model_prepared(prepared)
        for observer in RunObserver.registered if not evaluation_mode else ():
            observer.model_prepared(prepared)
        return prepared.module

    def parallel_of(self, model: nn.Module) -> ParallelModel:
        """How a model is spread; one that was not prepared here is each rank's own."""
        found = next((known for known in self.models if known.module is model), None)
        return ParallelModel(model) if found is None else found

    def whole_of(self, model: nn.Module) -> FullModelSpec | None:
        """What a model was of which this rank has some blocks; None for others."""
        number = next((i for i, known in enumerate(self.models) if known.module is model), None)
        return None if number is None else self._wholes.get(number)

    def finish_steps(self) -> None:
        """Wait for steps of optimizers that go on in other threads. Raises what went wrong in them."""
        if self._offload is not None:
            self._offload.finish()

    def contents(self, further: dict[str, list[object]]) -> CheckpointContents:
        """What a checkpoint is made of: the prepared objects and ``further`` ones."""
        self.finish_steps()
        meshes, place = self._meshes, None
        if meshes.axes.splits_model:
            place = DataCoordinates(
                meshes.data_rank, meshes.data_size, meshes.gradient_rank, meshes.gradient_size
            )
        return CheckpointContents(
            models=[model.plain for model in self.models],
            parts={
                "optimizer": list(self.optimizers),
                "scheduler": list(self.schedulers),
                "loader": list(self.loaders),
                "scaler": [] if self._scaler is None else [self._scaler],
                **further,
            },
            place=place,
            whole=self._wholes,
        )

    def prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        if self._seen.has_made(optimizer):
            assert isinstance(optimizer, PreparedOptimizer)
            return optimizer
        if self.spikes is not None and self.optimizers:
            refuse_second_optimizer(optimizer)
        complete_optimizer(optimizer)
        torch_optim.probe()
        self.registry.add_optimizer(optimizer)
        if self._runtime.world_size > 1 and not self._options.parallel.replaces_parameters:
            self._draws.watch(optimizer)
        kind = PreparedOptimizer if self._damage is None else partial(CheckedOptimizer, checks=self._damage)
        prepared = kind(
            optimizer,
            self._step,
            self._scaler,
            self._check_parameters,
            clip_norm=self._options.gradient_clipping,
            after_zero_grad=notifies_of_clearing(
                self.spikes,
                partial(self.registry.discard_unreduced, optimizer)
                if self._options.parallel.shards
                else None,
            ),
            other_stages=self.other_stages,
            before_step=self._before_step,
            after_clip=self._clipped,
            may_step=asked_before_step(self.spikes, self.other_stages, self._scaler),
        )
        if self._runtime.world_size > 1:  # on one rank nothing has to be equal
            optimizer.register_step_post_hook(_after_step(self.gradients.watch))
        self._seen.add(optimizer, prepared)
        self.optimizers.append(prepared)
        for observer in RunObserver.registered:
            observer.optimizer_prepared(optimizer)
        return prepared

    def prepare_loader(
        self, loader: DataLoader[object], device_placement: bool | None = None
    ) -> PreparedLoader:
        if self._seen.has_made(loader):
            assert isinstance(loader, PreparedLoader)
            return loader
        ranks = self._meshes.data_size if self._options.loaders.split_batches else 1
        check_micro_batch(loader, self._options.micro_batch_size, ranks)
        place = self._device_placement if device_placement is None else device_placement
        chosen = loader
        for observer in RunObserver.registered:
            chosen = observer.loader_comes(chosen)
        prepared = prepare_loader(
            chosen,
            runtime=self._runtime,
            step=self._step,
            config=self._options.loaders,
            communicator=self._communicator,
            device=self._runtime.device if place else None,
            rng_types=self._rng_types,
            axes=self._meshes.axes,
        )
        self._seen.add(loader, prepared)
        self.loaders.append(prepared)
        for observer in RunObserver.registered:
            observer.loader_prepared(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        if self._seen.has_made(scheduler):
            assert isinstance(scheduler, PreparedScheduler)
            return scheduler
        own = [o for o in self.optimizers if scheduler.optimizer is o or scheduler.optimizer is o.optimizer]
        one_step_a_call = (
            self._options.loaders.split_batches
            or not self._step_scheduler_with_optimizer
            or getattr(scheduler, "counts_optimizer_steps", False)
        )
        prepared = PreparedScheduler(
            scheduler,
            own or self.optimizers,
            self._step,
            steps_per_call=1 if one_step_a_call else self._meshes.data_size * self._step.virtual_ranks,
            step_with_optimizer=self._step_scheduler_with_optimizer,
        )
        if prepared.steps_per_call > 1:
            logger.warning(
                "%s Pass step_scheduler_with_optimizer=False to count its steps yourself.",
                prepared.describe(),
            )
        self._seen.add(scheduler, prepared)
        self.schedulers.append(prepared)
        return prepared

    def other_stages(self) -> OtherStages | None:
        """Who else holds parameters of the prepared models; None: nobody."""
        group = self._meshes.stage_group
        if group is None:
            return None
        return OtherStages(group, set().union(*(model.counted_elsewhere() for model in self.models)))

    def clip_norm(
        self, parameters: list[torch.Tensor], max_norm: float, norm_type: float, window_ended: bool
    ) -> torch.Tensor:
        """See ``clipping.clip_norm``: over all ranks that hold parameters."""
        for observer in RunObserver.registered if window_ended else []:
            observer.before_clip()
        part = self._step.clock.enter("optimizer")
        in_files = self._offload is not None and self._offload.keeps_gradients
        others = None if self._meshes.axes.pp == 1 else self.other_stages()
        norm = clip_norm(parameters, max_norm, norm_type, window_ended, others, in_files)
        self._step.clock.enter(part)
        if window_ended:
            self._clipped(norm)
            if self.spikes is not None:
                self.spikes.clipped(norm)
        return norm

    def _clipped(self, norm: torch.Tensor) -> None:
        self._measures.clipped(norm)
        for observer in RunObserver.registered:
            observer.clipped(norm)

    def override_even_batches(self, even_batches: bool) -> None:
        """Set it on all loaders that can still be changed, and warn about the others."""
        for loader in self.loaders:
            try:
                loader.even_batches = even_batches
            except UsageError as error:
                logger.warning("%s", error)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """All parameters of the prepared models."""
        for model in self.models:
            yield from model.module.parameters()

    def clear(self) -> None:
        self._measures.clear()
        if self._offload is not None:
            self._offload.clear()
        self._seen.clear()
        self.registry.clear()
        self._step_checks.stop()
        self._wholes.clear()
        self.verifications.clear()
        self.gradients.clear()
        if self._scaler is not None:
            self._scaler.clear()
        if self._damage is not None:
            self._damage.clear()
        if self.spikes is not None:
            self.spikes.load_state_dict(None)
        self.models.clear()
        self.optimizers.clear()
        self.schedulers.clear()
        self.loaders.clear()

    def _take_over(self, prepared: ParallelModel, before: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Let optimizers have the parameters that came in the place of others. Returns these by name."""
        now = dict(prepared.plain.named_parameters(remove_duplicate=False))
        self.registry.add_model(prepared, before, now, self.optimizers)
        return now

    def parameters_at_rest(self) -> Iterator[torch.nn.Parameter]:
        """All parameters of the prepared models, where they are sharded not gathered."""
        self.registry.reshard()
        return self.parameters()

    def _before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        self.gradients.before_step(optimizer, has_closure)
        for observer in RunObserver.registered if not has_closure else ():
            observer.before_clip()

    def _check_parameters(self, optimizer: Optimizer) -> None:
        if self._runtime.world_size > 1:
            check_trained(optimizer, self.parameters_at_rest())
        if self._offload is not None:
            self._offload.take_over(optimizer)


def _after_step(watch: BackwardWatch) -> Callable[[Optimizer, object, object], None]:
    def after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
        watch.after_step(optimizer)

    after_step.reads_no_parameter = True  # type: ignore[attr-defined]  # so that an offloaded step need not be over
    return after_step


def _full_model_spec(model: nn.Module) -> FullModelSpec:
    """The names of all weights, before other ranks' blocks leave."""
    return FullModelSpec(tuple(model.state_dict()), ties_of(model))
