"""The front: the methods that a training script calls. Each delegates to the layer that owns the matter."""

from __future__ import annotations

import inspect
import os
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep import preparation
from lockstep.comm.methods import CollectiveMethods
from lockstep.config.arguments import NOT_OPTIONS, AcceleratorArguments, parallel_fields
from lockstep.config.enums import DistributedType, DynamoBackend, PrecisionType
from lockstep.config.handlers import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    KwargsHandler,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from lockstep.config.merge import ExternalSettings
from lockstep.config.options import Options, fit_to_world, resolve_options
from lockstep.config.options_view import OptionsView
from lockstep.config.parallel import Parallel
from lockstep.config.sources import control_endpoint
from lockstep.errors import StateResetError, UsageError
from lockstep.observe import hang
from lockstep.observe.methods import TrackingMethods
from lockstep.observe.run_observer import RunObserver
from lockstep.preparation.batches import BatchMethods
from lockstep.preparation.checkpoints import CheckpointMethods
from lockstep.preparation.checks import check_backend
from lockstep.preparation.training import TrainingMethods
from lockstep.preparation.weights import WeightMethods
from lockstep.runtime import process
from lockstep.runtime.control import ProcessControl
from lockstep.runtime.failure import install_excepthook
from lockstep.runtime.memory import release_memory
from lockstep.runtime.run_state import RunState
from lockstep.runtime.step import StepState
from lockstep.train.accumulation import Accumulation

if TYPE_CHECKING:
    from lockstep.data.loader import PreparedLoader
    from lockstep.observe.measures.measures import Measures
    from lockstep.parallel.materialize import InitWeights
    from lockstep.train.loss_scale import LossScaler
    from lockstep.train.optimizer import PreparedOptimizer
    from lockstep.train.scheduler import PreparedScheduler


def _external_settings(*asked: Any) -> ExternalSettings:
    """Return what plugins, a DeepSpeed JSON or Accelerate's variables ask for: imported when there are some."""
    from lockstep.compat.settings import external_settings

    return external_settings(*asked)


class Accelerator(
    ProcessControl,
    OptionsView,
    CollectiveMethods,
    TrainingMethods,
    BatchMethods,
    CheckpointMethods,
    WeightMethods,
    TrackingMethods,
):
    """Makes a plain training loop run on one process or on many.

    Args:
        device_placement: Move models and batches to this process's device.
        split_batches: Whether the ``batch_size`` of a loader is that of the global batch, of which each rank
            takes a slice.
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``. A value that is passed here wins over the flag, the
            environment and the file.
        gradient_accumulation_steps: Micro-batches for each optimizer step.
        cpu: Compute on the CPU even if the machine has an accelerator.
        dataloader_config: See ``DataLoaderConfiguration``.
        deepspeed_plugin: A DeepSpeed configuration; see ``DeepSpeedPlugin``. It must agree with all other arguments.
        fsdp_plugin: How models are sharded, in FSDP's words; see ``FullyShardedDataParallelPlugin``.
        torch_tp_plugin: Refused; pass ``parallel="tp=2"`` instead.
        megatron_lm_plugin: Refused, because there is no Megatron-LM here.
        rng_types: Generators to make equal on all ranks at the start of each epoch.
        log_with: Names of trackers, tracker objects, or ``"all"``.
        project_dir: Where trackers and checkpoints write.
        project_config: See ``ProjectConfiguration``.
        gradient_accumulation_plugin: More options for accumulation, in place of
            ``gradient_accumulation_steps``; see ``GradientAccumulationPlugin``.
        step_scheduler_with_optimizer: Whether prepared schedulers advance only when their optimizer steps.
        kwargs_handlers: Objects with options of DDP, the loss scale, the process group, autocast and the profiler.
        dynamo_backend: The ``torch.compile`` backend that compiles prepared models.
        dynamo_plugin: More of ``torch.compile``'s options, in place of ``dynamo_backend``.
        deepspeed_plugins: Several DeepSpeed plugins by name, which may differ only in their stage. The first one is
            active until ``state.select_deepspeed_plugin(name)`` is called.
        parallelism_config: The same as ``parallel``, written as sizes of mesh axes; see ``ParallelismConfig``.
        parallel: How models are spread: a line such as ``"zero=3 activation=full"``, a mapping, or a ``Parallel``.
        watch: Whether this process is watched for hangs and stop signals, see below. With None, the flag, the
            environment or the file decides; if none of them does, the process is watched.
        run_dir: The folder for the run's measures, see ``measures``. ``"no"`` writes nothing. With None, the flag,
            the environment or the file decides; if none of them does, it is ``run`` in ``project_dir``, if there is
            a ``project_dir``.
        log_measures: Whether ``log`` also sends the measures to the trackers, under names that begin with
            ``lockstep/``.
        further: Single fields of ``Parallel``, such as ``zero=3`` or ``blocks=rule``. Options of Accelerate that do
            not exist here are refused by name.

    The first ``Accelerator`` in a process joins the process group. It also changes the process:

    - An uncaught exception ends the process with its rank and a record for the launcher (``sys.excepthook``).
    - With ``watch``, SIGTERM, SIGUSR1 and SIGUSR2 stop the run at a step boundary. Two daemon threads report this
      rank's progress to the launcher over TCP. Without ``lockstep launch``, rank 0 has a third thread with a TCP
      server for these reports. A process that trains alone has one thread, and no socket for others.
    - On CPUs, the ranks of one host exchange tensors through shared memory. A daemon thread for each process group
      continues asynchronous calls. ``LOCKSTEP_BACKEND=gloo`` leaves both out, and so does
      ``lockstep launch --backend gloo``.

    ``watch=False`` leaves signals, sockets, and the threads of the watch alone.
    ``PartialState().destroy_process_group()`` takes all of this back but the exception hook, which stays. The function
    of that name in torch ends the process group alone.

    Raises:
        ConfigError: a value is unknown or contradicts another one. The message names it.

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
        deepspeed_plugin: object = None,
        fsdp_plugin: object = None,
        torch_tp_plugin: None = None,
        megatron_lm_plugin: None = None,
        rng_types: list[str] | None = None,
        log_with: object = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: object = None,
        parallelism_config: object = None,
        *,
        parallel: str | Parallel | Mapping[str, object] | None = None,
        watch: bool | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        log_measures: bool = False,
        **further: object,
    ) -> None:
        given = dict(locals())
        del given["self"]
        self._arguments: dict[str, Any] = given | given.pop("further")
        # From now on an exception that nobody catches reaches the launcher.
        install_excepthook()
        options = self._resolved(given, further)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.runtime = self._joined(options)
        self._options = options = fit_to_world(options, self.runtime.world_size)
        self._watch = self._watching(options)
        for text in options.config_warnings if self.runtime.is_main else ():
            warnings.warn(text, stacklevel=2)
        self._step = StepState(
            accumulation_steps=options.accumulation.num_steps or 1,
            sync_with_dataloader=options.accumulation.sync_with_dataloader,
            sync_each_batch=options.accumulation.sync_each_batch,
            adjust_scheduler=options.accumulation.adjust_scheduler,
            clock=self._watch.clock,
        )
        self._scaler = self._loss_scaler(options)
        self._registered: list[object] = []
        self._log_with = log_with
        if log_with is not None:
            _ = self._trackers  # says what is wrong with it
        alive = [made for made in Accelerator._made if made() is not None]
        Accelerator._made = [*alive, weakref.ref(self)]

    # The steps of the constructor ---------------------------------------------------------------------

    def _resolved(self, given: Mapping[str, Any], further: Mapping[str, object]) -> Options:
        """Return the arguments, merged with what environment and files say."""
        refused = {name: given[name] for name in NOT_OPTIONS if name in given}
        fields = parallel_fields({**further, **refused}, inspect.signature(type(self)).parameters)
        arguments = AcceleratorArguments.of(given, parallel_fields=fields)
        if not arguments.asks_for_sharding:
            arguments = replace(arguments, deepspeed_plugins=Accelerator._several_plugins())
        options = resolve_options(arguments, _external_settings)
        for observer in RunObserver.registered:
            options = observer.options(options)
        if options.compile_options is not None:
            check_backend(options.compile_options.get("backend"))
        return options

    @staticmethod
    def _joined(options: Options) -> process.Runtime:
        """Return this process, as a member of the process group."""
        runtime = process.start_runtime(options.cpu, options.init)
        if options.fp8 is not None:
            from lockstep.parallel.float8 import check_float8

            check_float8(options.fp8, options.parallel, runtime.device)
        if options.cpu_affinity:
            process.apply_affinity(runtime)
        return runtime

    def _watching(self, options: Options) -> hang.ProcessWatch:
        """Return the watch of this process, which saves a checkpoint before a stop."""
        watch = hang.watch_process(self.runtime, options.watch, options.grace_s)
        watch.save_with(self._save_and_end)
        return watch

    def _loss_scaler(self, options: Options) -> LossScaler | None:
        if options.mixed_precision != "fp16":
            return None
        from lockstep.train.loss_scale import LossScaler

        whole = self.runtime.world_size == 1 or not options.parallel.replaces_parameters
        return LossScaler(self.runtime.device, options.scaler, lambda: self.meshes.stage_group, whole)

    def __reduce__(self) -> tuple[Any, ...]:
        """Give a copy, and what is unpickled, the same arguments and nothing prepared."""
        return partial(type(self), **self._arguments), ()

    @classmethod
    def latest(cls) -> Accelerator | None:
        """Return the ``Accelerator`` that was made last and still exists, or None.

        ``lockstep.state`` shows the state of this one.

        Examples:
            ```python
            from lockstep import Accelerator

            accelerator = Accelerator()
            assert Accelerator.latest() is accelerator
            ```
        """
        return next((found for made in reversed(cls._made) if (found := made()) is not None), None)

    @classmethod
    def _several_plugins(cls) -> dict[str, object] | None:
        """Return the plugins of the latest ``Accelerator``, which one that is made without any shares; None: it has not
        several."""
        latest = cls.latest()
        several = {} if latest is None else latest._options.deepspeed_plugins
        return {name: plugin for name, (plugin, _) in several.items()} or None

    @classmethod
    def forget_all(cls) -> None:
        """Make ``latest`` return None until another ``Accelerator`` is made, for example between two tests.

        Examples:
            ```python
            from lockstep import Accelerator

            accelerator = Accelerator()
            Accelerator.forget_all()  # as before the first test of a suite
            assert Accelerator.latest() is None
            ```
        """
        cls._made.clear()

    # Parts, each made when it is first used -------------------------------------------------------------

    @cached_property
    def _accumulation(self) -> Accumulation:
        options = self._options
        stages = [0, *(stage for _, stage in options.deepspeed_plugins.values())]
        return Accumulation(
            self._step,
            self.runtime,
            lambda model, inside_window: self._preparation.models.parallel_of(model).no_sync(inside_window),
            # Where gradients are averaged before the window ends.
            agreed_divisor=self._step.sync_each_batch
            or options.ddp.static_graph
            or max(options.parallel.zero, *stages) > 1,
        )

    @cached_property
    def _preparation(self) -> preparation.Preparation:
        run = preparation.RunContext(
            self._options,
            self.runtime,
            self.meshes,
            self._step,
            self._communicator,
            self._scaler,
            self.device_placement,
            self.step_scheduler_with_optimizer,
            self._accumulation.ranks_step_together,
            self.measures,
        )
        made = preparation.Preparation(run)
        if made.spikes is not None:
            made.spikes.goes_back = self._goes_back()
        return made

    @cached_property
    def measures(self) -> Measures:
        """Measures of this run, such as the seconds of each part of a step, samples and tokens a second, FLOPs, memory.

        See ``Measures`` for all of them.

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
            print(accelerator.measures.samples_per_second, accelerator.measures.seconds)
            ```
        """
        from lockstep.observe.measures.measures import Measures

        endpoint = control_endpoint()
        return Measures(self.runtime, self._step, self._options, endpoint is not None and endpoint.round > 0)

    def _change_options(self, **changes: Any) -> None:
        if "project" in changes and "_checkpointer" in vars(self):
            raise UsageError(
                "project_configuration was set after a checkpoint of this run was saved or loaded, or got a hook. Set "
                "it before, or pass project_config to Accelerator."
            )
        self._options = replace(self._options, **changes)
        self._preparation.change_options(**changes)

    @cached_property
    def _window(self) -> preparation.AccumulationState:
        return preparation.AccumulationState(
            self._accumulation,
            self._preparation.models.prepared,
            self._preparation.optimizers.prepared,
            self.meshes.axes,
            self.meshes.gradient_size,
            self._preparation.gradients.forget,
            self.measures,
            self._preparation.spikes,
        )

    @property
    def should_save_model(self) -> bool:
        """True on local rank 0 of each machine."""
        return self.is_local_main_process

    @staticmethod
    def verify_device_map(model: nn.Module) -> bool:
        """Return whether a part of ``model`` was dispatched to several devices by a device map.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
            assert not Accelerator.verify_device_map(model)
            ```
        """
        return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())

    # Where the step is -------------------------------------------------------------------------------

    @property
    def distributed_type(self) -> DistributedType:
        """``FSDP`` if models are sharded, on any device. Otherwise the kind of devices of this run."""
        sharded = self.is_fsdp2 and self.runtime.world_size > 1
        return DistributedType.FSDP if sharded else super().distributed_type

    @cached_property
    def state(self) -> RunState:
        """The rank, device, precision and plugins of this run, under the names of Accelerate's ``AcceleratorState``."""
        compiling: Mapping[str, Any] = self._options.compile_options or {}
        return RunState(
            self.mixed_precision,
            self.distributed_type,
            self._fsdp_plugin(),
            self.deepspeed_plugin,
            self.parallelism_config,
            {name: plugin for name, (plugin, _) in self._options.deepspeed_plugins.items()},
            self._select_deepspeed_plugin,
            self._arguments["dynamo_plugin"]
            or TorchDynamoPlugin(backend=compiling.get("backend", DynamoBackend.NO)),
        )

    def _select_deepspeed_plugin(self, name: str) -> None:
        plugin, stage = self._options.deepspeed_plugins[name]
        self._change_options(deepspeed_plugin=plugin, parallel=replace(self.parallel, zero=stage))
        self.state.deepspeed_plugin = plugin

    def _fsdp_plugin(self) -> object:
        """Return the plugin that was passed, or one that says how models are sharded; None: they are not."""
        if not self.is_fsdp2:
            return None
        from lockstep.compat.fsdp.plugin import resolved_plugin

        return resolved_plugin(self._options.fsdp_plugin, self.parallel)

    # Lists that other libraries look into.

    @property
    def _models(self) -> list[nn.Module]:
        return [model.module for model in self._preparation.models.prepared]

    @property
    def _optimizers(self) -> list[PreparedOptimizer]:
        return self._preparation.optimizers.prepared

    @property
    def _schedulers(self) -> list[PreparedScheduler]:
        return self._preparation.optimizers.schedulers

    @property
    def _dataloaders(self) -> list[PreparedLoader]:
        return self._preparation.loaders.prepared

    # Prepare ----------------------------------------------------------------------------------------

    def prepare(self, *args: object, device_placement: list[bool | None] | None = None) -> Any:
        """Make models, optimizers, loaders and schedulers ready for this run. Call it on every rank.

        Args:
            args: The objects, in any order and number. Objects of other types are returned as they are.
            device_placement: For each object, whether it is moved to this process's device. None in the list means
                the ``device_placement`` of this ``Accelerator``.

        Returns:
            The prepared objects as a tuple, in the order of ``args``. A single object is returned without a tuple.

        Raises:
            UsageError: an object cannot give a correct result, for example a model that DDP wraps already.
            StateResetError: ``AcceleratorState._reset_state()`` was called after the last ``Accelerator`` was made.

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
        if Accelerator.latest() is None:
            raise StateResetError(
                "`AcceleratorState` object has no attribute `distributed_type`. This happens if "
                "`AcceleratorState._reset_state()` or `Accelerator.forget_all()` is called after the Accelerator was "
                "made. Make a new Accelerator."
            )
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
        """Prepare one model.

        Args:
            model: The model.
            device_placement: Whether it is moved to this process's device. None: as for this ``Accelerator``.
            evaluation_mode: The model is not trained, so it is neither wrapped by DDP nor sharded.
            init_weights: A function that fills the parameters and buffers of one module. It is called with each
                module of a model on the meta device that has parameters or buffers of its own.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            teacher = accelerator.prepare_model(torch.nn.Linear(4, 1), evaluation_mode=True)
            assert teacher(torch.randn(8, 4)).shape == (8, 1)
            ```
        """
        return self._preparation.models.prepare(model, device_placement, evaluation_mode, init_weights)

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Prepare one optimizer.

        Args:
            optimizer: A torch optimizer.
            device_placement: Ignored: the state stays on the device of the parameters.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = accelerator.prepare_model(torch.nn.Linear(4, 1))
            optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            accelerator.backward(model(torch.randn(8, 4)).square().mean())
            optimizer.step()
            ```
        """
        prepared = self._preparation.optimizers.prepare(optimizer)
        self._window.watch()
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[object], device_placement: bool | None = None
    ) -> PreparedLoader:
        """Prepare one data loader. It then yields this rank's batches. Call it on every rank.

        Args:
            data_loader: A torch ``DataLoader``.
            device_placement: Whether batches are moved to this process's device. None: as for this ``Accelerator``.

        Raises:
            UsageError: the loader is empty, has fewer samples than there are ranks, or is prepared already.
            ConfigError: the settings do not go with this loader.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=8)
            loader = accelerator.prepare_data_loader(loader)
            assert len(loader) == 4 // accelerator.num_processes  # this rank's batches
            ```
        """
        return self._preparation.loaders.prepare(data_loader, device_placement)

    def prepare_scheduler(self, scheduler: object) -> PreparedScheduler:
        """Prepare one learning rate scheduler, ``scheduler``. It then advances only after real optimizer steps.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = torch.nn.Linear(4, 1)
            optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, step_size=10)
            scheduler = accelerator.prepare_scheduler(scheduler)
            assert scheduler.get_last_lr() == [0.1]
            ```
        """
        return self._preparation.optimizers.prepare_scheduler(scheduler)

    def free_memory(self, *objects: object) -> list[Any]:
        """Forget all prepared objects and free device memory.

        Returns a list with one None for each object that was passed. Assign it to the variables, as below: memory is
        freed only when no variable refers to an object any more.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            model, optimizer = accelerator.free_memory(model, optimizer)
            assert model is None and optimizer is None
            ```
        """
        self._preparation.clear()
        self._accumulation.reset()
        return release_memory(*objects)

    clear = free_memory

    def wait_for_everyone(self) -> None:
        """Wait until every rank has called this method.

        Examples:
            ```python
            from pathlib import Path
            from lockstep import Accelerator

            accelerator = Accelerator()
            if accelerator.is_main_process:
                Path("ready.txt").write_text("ready")
            accelerator.wait_for_everyone()
            assert Path("ready.txt").exists()  # on every rank
            ```
        """
        part = self._step.clock.enter("wait")
        super().wait_for_everyone()
        self._step.clock.enter(part)

    def end_training(self) -> None:
        """End the run: finish the trackers, finish steps and a save in the background, and wait for all ranks.

        A rank may take as long as it needs for what it does afterwards, such as an export or an upload. It is not
        taken for a hang.

        Examples:
            ```python
            from lockstep import Accelerator

            accelerator = Accelerator(log_with="jsonl", project_dir="ended")
            accelerator.init_trackers("digits")
            accelerator.log({"loss": 0.5}, step=1)
            accelerator.end_training()  # the file is complete
            ```
        """
        self._watch.ending()
        self._preparation.finish_steps()
        self._trackers.finish()
        if "measures" in vars(self):
            self.measures.finish("end_training")
        if "_checkpointer" in vars(self):  # it was used
            self._checkpointer.close()
        self.wait_for_everyone()
        self._watch.done()
