"""The front: the methods that a training script calls. Each delegates to the layer that owns the matter."""

from __future__ import annotations

import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.comm.methods import CollectiveMethods
from lockstep.config.enums import DistributedType, PrecisionType
from lockstep.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    KwargsHandler,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from lockstep.config.merge import ExternalSettings
from lockstep.config.options import fit_to_world, parallel_fields, resolve_options
from lockstep.config.options_view import OptionsView
from lockstep.config.parallel import Parallel
from lockstep.data.loader import PreparedLoader
from lockstep.data.skip import skip_first_batches
from lockstep.observe.hang.process import watch_process
from lockstep.observe.methods import TrackingMethods
from lockstep.observe.state_bytes import StateBytes, count_state
from lockstep.observe.trackers.run import TrackerSet
from lockstep.parallel.autocast import autocast
from lockstep.parallel.compilation import check_backend
from lockstep.parallel.ddp.join import join_replicas
from lockstep.parallel.materialize import InitWeights
from lockstep.parallel.parallel_model import PipelinedModel, call_of, unwrap
from lockstep.preparation.files import FileMethods
from lockstep.preparation.prepare import Preparation
from lockstep.preparation.window import AccumulationState
from lockstep.runtime import process
from lockstep.runtime.control import ProcessControl, RunState
from lockstep.runtime.memory import release_memory
from lockstep.runtime.step import StepState
from lockstep.train import clipping
from lockstep.train.accumulation import Accumulation, trigger_sync
from lockstep.train.loss_scale import LossScaler
from lockstep.train.optimizer import PreparedOptimizer
from lockstep.train.scheduler import PreparedScheduler


def _external_settings(*asked: Any) -> ExternalSettings:
    """What plugins, a DeepSpeed JSON or Accelerate's variables ask for: imported when there are some."""
    from lockstep.compat.settings import external_settings

    return external_settings(*asked)


def _forget(made: weakref.ref[Accelerator]) -> None:
    with suppress(ValueError):  # ``forget_all`` was before
        Accelerator._made.remove(made)


class Accelerator(ProcessControl, OptionsView, CollectiveMethods, FileMethods, TrackingMethods):
    """Makes a plain training loop run on one process or on many.

    Args:
        device_placement: Move models and batches to this process's device.
        split_batches: A loader's batch is the global one; each rank takes a slice.
        mixed_precision: ``no``, ``fp16`` or ``bf16`` (code wins over flag, environment and file).
        gradient_accumulation_steps: Micro-batches for each optimizer step.
        cpu: Compute on the CPU although there is an accelerator.
        dataloader_config: See ``DataLoaderConfiguration``.
        deepspeed_plugin: A DeepSpeed configuration; see ``DeepSpeedPlugin``. It must agree with all other arguments.
        fsdp_plugin: How models are sharded in FSDP's words; see ``FullyShardedDataParallelPlugin``.
        torch_tp_plugin: Refused by name; it is ``parallel="tp=2"`` here.
        megatron_lm_plugin: Refused by name.
        rng_types: Generators to make equal on all ranks at the start of each epoch.
        log_with: Names of trackers, tracker objects, or ``"all"``.
        project_dir: Where trackers and checkpoints write.
        project_config: See ``ProjectConfiguration``.
        gradient_accumulation_plugin: See ``GradientAccumulationPlugin``; instead of the number.
        step_scheduler_with_optimizer: Prepared schedulers advance only with their optimizer.
        kwargs_handlers: Options of DDP, loss scale, process group, autocast and profiler.
        dynamo_backend: A ``torch.compile`` backend to compile prepared models with.
        dynamo_plugin: The same with more of ``torch.compile``'s options; instead of the name.
        deepspeed_plugins: A list or mapping with the one ``deepspeed_plugin``.
        parallelism_config: The same as ``parallel`` in sizes of axes; see ``ParallelismConfig``.
        parallel: How models are spread: a line such as ``"zero=3 activation=full"``, a mapping, or a ``Parallel``.
        watch: Whether this process is watched for hangs and stop signals, see below (None: as flag, environment and
            file say, else yes).
        further: Fields of ``Parallel`` one by one (``zero=3``, ``blocks=rule``). Options of Accelerate that do not
            exist here are refused by name.

    What the first one in a process does to it, besides joining the process group:

    - An uncaught exception ends the process with its rank and a record for the launcher (``sys.excepthook``).
    - With ``watch``: SIGTERM, SIGUSR1 and SIGUSR2 stop the run at a step boundary; two daemon threads tell the launcher
      what this rank gets done, over TCP on this machine. Without a launcher of ours rank 0 listens for the others.
    - With ``watch``, in runs of up to 16 ranks on CPUs: the collectives in ``torch.distributed`` are replaced by ones
      that compare the script's own calls between the ranks first.

    All of this ends with the process group. ``watch=False`` leaves signals, threads, sockets and functions alone.

    Raises:
        ConfigError: a value is unknown or contradicts another; the message names it.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator

        accelerator = Accelerator()
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=8))
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        ```
    """

    _made: ClassVar[list[weakref.ref[Accelerator]]] = []

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int | None = 1,
        cpu: bool | None = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: None = None,
        megatron_lm_plugin: None = None,
        rng_types: list[str] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        *,
        parallel: str | Parallel | Mapping[str, Any] | None = None,
        watch: bool | None = None,
        **further: Any,
    ) -> None:
        given = dict(locals())
        del given["self"]
        self._arguments: dict[str, Any] = given | given.pop("further")
        process.watch_exceptions()
        options = resolve_options(
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            cpu=cpu,
            parallel=parallel,
            parallel_fields=parallel_fields(
                {**further, "torch_tp_plugin": torch_tp_plugin, "megatron_lm_plugin": megatron_lm_plugin},
                inspect.signature(type(self)).parameters,
            ),
            parallelism_config=parallelism_config,
            fsdp_plugin=fsdp_plugin,
            deepspeed_plugin=deepspeed_plugin,
            deepspeed_plugins=deepspeed_plugins,
            dynamo_backend=dynamo_backend,
            dynamo_plugin=dynamo_plugin,
            split_batches=split_batches,
            dataloader_config=dataloader_config,
            project_dir=project_dir,
            project_config=project_config,
            kwargs_handlers=kwargs_handlers,
            watch=watch,
            external=_external_settings,
        )
        if options.compile_options is not None:
            check_backend(options.compile_options.get("backend"))
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.runtime = process.start(options.cpu, options.init)
        self._options = options = fit_to_world(options, self.runtime.world_size)
        self._watch = watch_process(self.runtime, options.watch, options.grace_s)
        self._watch.save_with(self._save_before_stop)
        for text in options.config_warnings if self.runtime.is_main else ():
            warnings.warn(text, stacklevel=2)
        self._step = StepState(
            accumulation_steps=options.accumulation.num_steps or 1,
            sync_with_dataloader=options.accumulation.sync_with_dataloader,
            sync_each_batch=options.accumulation.sync_each_batch,
            adjust_scheduler=options.accumulation.adjust_scheduler,
            clock=self._watch.clock,
        )
        self._scaler = (
            LossScaler(self.runtime.device, options.scaler, lambda: self.meshes.stage_group)
            if options.mixed_precision == "fp16"
            else None
        )
        self._rng_types = rng_types
        self._registered: list[Any] = []
        self._trackers = TrackerSet(log_with, options.project.logging_dir, self.runtime.is_main)
        Accelerator._made.append(weakref.ref(self, _forget))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, and what is unpickled, has the same arguments and nothing prepared."""
        return partial(type(self), **self._arguments), ()

    @classmethod
    def latest(cls) -> Accelerator | None:
        """The latest ``Accelerator`` that still exists: what ``lockstep.state`` shows."""
        return cls._made[-1]() if cls._made else None

    @classmethod
    def forget_all(cls) -> None:
        """Let ``latest`` know none of those that were made so far."""
        cls._made.clear()

    # Parts, each made when it is first used -------------------------------------------------------------

    @cached_property
    def _accumulation(self) -> Accumulation:
        options = self._options
        return Accumulation(
            self._step,
            self.runtime,
            lambda model, inside_window: self._preparation.parallel_of(model).no_sync(inside_window),
            # Where gradients are averaged before the window ends.
            agreed_divisor=self._step.sync_each_batch
            or options.ddp.static_graph
            or options.parallel.zero > 1,
        )

    @cached_property
    def _preparation(self) -> Preparation:
        return Preparation(
            self._options,
            self.runtime,
            self.meshes,
            self._step,
            self._communicator,
            self._scaler,
            self._rng_types,
            self.device_placement,
            self.step_scheduler_with_optimizer,
            lambda: self._accumulation.ranks_step_together,
        )

    @cached_property
    def _window(self) -> AccumulationState:
        return AccumulationState(
            self._accumulation,
            self._preparation.models,
            self._preparation.optimizers,
            self.meshes,
            self._preparation.own_gradients.forget,
        )

    # Where the step is -------------------------------------------------------------------------------

    @property
    def distributed_type(self) -> DistributedType:
        """``FSDP`` where models are sharded, whatever the device."""
        sharded = self.is_fsdp2 and self.runtime.world_size > 1
        return DistributedType.FSDP if sharded else super().distributed_type

    @cached_property
    def state(self) -> RunState:
        """This process and what the run was asked for, under the names that scripts read."""
        return RunState(
            self.mixed_precision,
            self.distributed_type,
            self._fsdp_plugin(),
            self.deepspeed_plugin,
            self.parallelism_config,
        )

    def _fsdp_plugin(self) -> Any:
        """The plugin that was passed, or one that says how models are sharded; None: they are not."""
        if not self.is_fsdp2:
            return None
        from lockstep.compat.fsdp.plugin import resolved_plugin

        return resolved_plugin(self._options.fsdp_plugin, self.parallel)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16; None with other precisions."""
        return self._scaler.scaler if self._scaler is not None else None

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._step.accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._step.accumulation_steps = GradientAccumulationPlugin(num_steps=steps).num_steps or 1

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends an accumulation window."""
        return self._step.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._step.sync_gradients = value

    @property
    def gradient_state(self) -> StepState:
        return self._step

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any optimizer's last fp16 step was skipped, on all ranks alike."""
        return any(optimizer.step_was_skipped for optimizer in self._preparation.optimizers)

    # Lists that other libraries look into.

    @property
    def _models(self) -> list[nn.Module]:
        return [model.module for model in self._preparation.models]

    @property
    def _optimizers(self) -> list[PreparedOptimizer]:
        return self._preparation.optimizers

    @property
    def _schedulers(self) -> list[PreparedScheduler]:
        return self._preparation.schedulers

    @property
    def _dataloaders(self) -> list[PreparedLoader]:
        return self._preparation.loaders

    # Prepare ----------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Make models, optimizers, loaders and schedulers ready, in any order and number.

        Objects of other types pass through. Returns them in the order given (one alone: itself).

        Raises:
            UsageError: an object was prepared before, or cannot give a correct result.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.AdamW(model.parameters())
            loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=8)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            ```
        """
        prepared = self._preparation.prepare(args, device_placement)
        self._window.watch()
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        init_weights: InitWeights | None = None,
    ) -> nn.Module:
        """``prepare`` for one model; with ``evaluation_mode`` it is not replicated for training.

        ``init_weights`` is called with each module of a model on the meta device that has parameters or
        buffers of its own, and fills these.
        """
        return self._preparation.prepare_model(model, device_placement, evaluation_mode, init_weights)

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """``prepare`` for one optimizer, whose state follows its parameters' device."""
        prepared = self._preparation.prepare_optimizer(optimizer)
        self._window.watch()
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None
    ) -> PreparedLoader:
        """``prepare`` for one loader."""
        return self._preparation.prepare_loader(data_loader, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """``prepare`` for one scheduler."""
        return self._preparation.prepare_scheduler(scheduler)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """The object that was passed to ``prepare``; without ``keep_fp32_wrapper`` also without autocast.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            plain = torch.nn.Linear(4, 1)
            model = accelerator.prepare(plain)
            assert accelerator.unwrap_model(model) is plain
            ```
        """
        self._preparation.offload.finish()
        return unwrap(model, keep_autocast=keep_fp32_wrapper, keep_compile=keep_torch_compile)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader without its first batches; costs no data for map-style datasets.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            loader = accelerator.prepare(torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=2))
            for batch in accelerator.skip_first_batches(loader, 3):  # of this epoch only; the next one uses loader
                print(batch.shape)
            ```
        """
        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget all prepared objects, and return None for each given one, so that memory can be freed."""
        self._preparation.clear()
        self._accumulation.reset()
        return release_memory(*objects)

    clear = free_memory

    # Inside a step ----------------------------------------------------------------------------------

    def backward(
        self, loss: torch.Tensor, *, weight: torch.Tensor | float | None = None, **kwargs: Any
    ) -> None:
        """Add the gradient of this micro-batch.

        Without ``weight``, the window's gradient is the mean over its micro-batches and ranks of
        ``loss`` (as in Accelerate). With it, it is the gradient of ``sum(weight * loss) / sum(weight)``
        over all of them: exactly that of one big batch when the weights are sample or token counts.

        Args:
            loss: 0-d, or with ``weight`` unreduced losses of any shape.
            weight: What a 0-d loss is the mean of, or a weight for each element of ``loss``
                (see ``sample_weights``). All ranks must pass one, or none.
            kwargs: Of ``torch.Tensor.backward``.

        Raises:
            UsageError: no prepared model was called, or weights do not fit.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(4, 1))
            loss = model(torch.randn(8, 4)).square().mean()
            accelerator.backward(loss)  # in place of loss.backward()
            ```
        """
        self._preparation.check_backward()
        self._step.clock.backward_begins()
        loss = self._accumulation.scale(loss, weight, self._preparation.gradients())
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        self._preparation.backward(loss, **kwargs)

    def train_step(
        self,
        model: nn.Module,
        loss_function: Callable[..., torch.Tensor],
        inputs: Any,
        targets: Any = (),
        *,
        weight: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        """Forward, loss and backward of one micro-batch; with a pipeline in the order of its schedule.

        Where the loss is computed outside of the model, this is the way to have another schedule than GPipe's. Other
        models do the same as three lines would.

        Args:
            loss_function: Called with the model's output and ``targets``; a mean over the batch, 0-d.
            inputs: What the model is called with: one value, a tuple of them, or a mapping of keywords. Tensors
                are [batch, ...] where a pipeline cuts them, else of any shape.
            targets: One value or a tuple of them, cut into the pipeline's micro-batches as the inputs are.
            weight: See ``backward``; a number or 0-d.

        Returns:
            The loss, 0-d and detached, on every rank.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            loss = accelerator.train_step(model, torch.nn.functional.mse_loss, torch.randn(8, 4), torch.randn(8, 1))
            optimizer.step()
            ```
        """
        parallel = self._preparation.parallel_of(model)
        if isinstance(parallel, PipelinedModel):
            self._preparation.verifications.before_step(model, loss_function, *call_of(inputs, targets))
        loss = parallel.loss_of(loss_function, inputs, targets, self.autocast)
        self.backward(loss, weight=weight)
        return loss.detach()

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """One micro-batch of ``gradient_accumulation_steps``; gradients are averaged after the last.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator(gradient_accumulation_steps=4)
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in torch.randn(8, 2, 4):  # 8 micro-batches, so 2 steps
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
            ```
        """
        return self._accumulation.accumulate(models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Backward inside adds to this rank's gradients without averaging them.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(4, 1))
            first, second = torch.randn(2, 8, 4)
            with accelerator.no_sync(model):
                accelerator.backward(model(first).square().mean())
            accelerator.backward(model(second).square().mean())  # averages the sum of both over the ranks
            ```
        """
        return self._accumulation.no_sync([model])

    def alone(self, model: nn.Module) -> AbstractContextManager[None]:
        """Each rank trains this model by itself inside: gradients, and weights of ``backward``, are its own."""
        return self._accumulation.alone([model])

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[None]:
        """Inside, backward averages gradients although the last forward ran in ``no_sync``."""
        return trigger_sync(model)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Run other code in the precision in which prepared models run.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator(mixed_precision="bf16")
            x = torch.randn(4, 4, device=accelerator.device)
            with accelerator.autocast():
                product = x @ x
            assert product.dtype == torch.bfloat16
            ```
        """
        return autocast(self.mixed_precision, self.device, autocast_handler or self._options.autocast)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """With fp16, divide gradients by the loss scale before looking at them (all optimizers, or these)."""
        if self._scaler is None or not self.sync_gradients:
            return
        optimizers = self._preparation.optimizers if optimizer is None else optimizer
        for item in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
            self._scaler.unscale(getattr(item, "optimizer", item))

    def clip_grad_norm_(
        self, parameters: clipping.Parameters, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip the total norm of whole windows' gradients; returns the norm before (0-d).

        Parameters have any shape: one or an iterable. Inside an accumulation window nothing is clipped.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            accelerator.backward(model(torch.randn(8, 4)).square().mean())
            norm = accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)  # between backward and step
            optimizer.step()
            ```
        """
        parameters = self._preparation.shards_of(clipping.as_list(parameters))
        self._unscale_owners(parameters)
        return self._preparation.clip_norm(parameters, max_norm, norm_type, self.sync_gradients)

    def clip_grad_value_(self, parameters: clipping.Parameters, clip_value: float) -> None:
        """Clamp whole windows' gradients, of parameters of any shape, to [-clip_value, clip_value]."""
        parameters = self._preparation.shards_of(clipping.as_list(parameters))
        self._unscale_owners(parameters)
        clipping.clip_value(parameters, clip_value, self.sync_gradients)

    def _unscale_owners(self, parameters: list[torch.Tensor]) -> None:
        if self._scaler is not None and self.sync_gradients:
            self._scaler.unscale_owners(parameters)

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Train although ranks have different numbers of batches.

        ``even_batches`` overrides that of the prepared loaders inside, where they read map-style data on
        every rank; others are warned about. Several micro-batches a step are refused inside.
        """
        loaders = list(self._preparation.loaders)
        before = [loader.even_batches for loader in loaders]
        try:
            if even_batches is not None and self.num_processes > 1:
                self._preparation.override_even_batches(even_batches)
            with join_replicas(joinables, self.runtime.world_size), self._accumulation.uneven_inputs():
                yield
        finally:
            for loader, value in zip(loaders, before, strict=True):
                loader.even_batches = value

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """Inside, these tensors are this rank's chunks of the sequence, and models work on chunks throughout.

        Then not even logits are whole on any rank. Everything that depends on the position must be among the buffers:
        inputs, ``position_ids``, and labels that were shifted before. The loss is the mean over the chunk. Without
        ``cp`` nothing happens.

        Args:
            buffers: Tensors of any shape, all of one length along their dim of the sequence: [batch, sequence, ...].
            buffer_seq_dims: That dim of each of them.
            no_restore_buffers: Those that keep their chunk, [batch, sequence / cp, ...], afterwards.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()  # on 4 ranks for example Accelerator(parallel="cp=4")
            model = accelerator.prepare(torch.nn.Embedding(100, 16))
            tokens = torch.randint(100, (2, 32))  # [batch, sequence]
            with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
                output = model(tokens)  # [batch, sequence / cp, width]
            ```
        """
        if self.meshes.axes.cp == 1:
            return nullcontext()
        from lockstep.parallel.context.split import split_sequence

        return split_sequence(
            [model.module for model in self._preparation.models],
            buffers or [],
            buffer_seq_dims or [],
            no_restore_buffers or set(),
        )

    def end_training(self) -> None:
        """Finish the trackers, and steps and a save in the background, and wait for all ranks.

        What a rank does after it (an export, an evaluation, an upload) may take as long as it needs.
        """
        self._watch.ending()
        self._preparation.offload.finish()
        self._trackers.finish()
        if "_checkpointer" in vars(self):  # it was used
            self._checkpointer.close()
        self.wait_for_everyone()
        self._watch.done()

    def _save_before_stop(self) -> str | None:
        """Save where the next ``load_state`` will look; None where there is no such place."""
        if self._preemption_hook is not None:
            place: str | None = self._preemption_hook()
        elif self._options.project.automatic_checkpoint_naming:
            place = self.save_state()
        else:
            place = None
        self.end_training()
        return place

    def state_bytes(self) -> StateBytes:
        """Bytes of the prepared models' weights and gradients and of their optimizers' state, on this rank."""
        self._preparation.offload.finish()
        return count_state(self._preparation.models, self._preparation.optimizers)
