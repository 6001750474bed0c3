"""Options that are passed to ``Accelerator`` as objects: plain data, no torch.

The field names and defaults are those that users of Accelerate know.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal

from lockstep.config.enums import DDPCommunicationHookType, DynamoBackend
from lockstep.config.values import check_between, check_word, no_text, parse_integer
from lockstep.errors import ConfigError


@dataclass
class KwargsHandler:
    """Base class of the options that ``Accelerator(kwargs_handlers=[...])`` takes.

    Those subclasses that Accelerate also has have the same fields and defaults there.

    Examples:
        ```python
        from lockstep import GradScalerKwargs
        from lockstep.utils import KwargsHandler

        handler = GradScalerKwargs(init_scale=1024.0)
        assert isinstance(handler, KwargsHandler)
        assert handler.to_kwargs() == {"init_scale": 1024.0}  # what differs from the defaults
        assert handler.to_dict()["growth_factor"] == 2.0  # all fields
        ```
    """

    def to_dict(self) -> dict[str, object]:
        """Return all fields: name -> value."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def to_kwargs(self) -> dict[str, object]:
        """Return the fields that differ from their defaults: name -> value."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if default[name] != value}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of ``torch.autocast``, for ``accelerator.autocast(...)`` and for prepared models.

    Args:
        enabled: False computes in the types of the tensors, as without ``mixed_precision``.
        cache_enabled: Whether autocast keeps the casted copy of a weight until the block ends. None: torch's default.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, AutocastKwargs

        accelerator = Accelerator(mixed_precision="bf16")
        x = torch.ones(2, 2, device=accelerator.device)
        with accelerator.autocast(AutocastKwargs(enabled=False)):  # a part that needs float32
            assert (x @ x).dtype == torch.float32
        ```
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of ``torch.nn.parallel.DistributedDataParallel`` (DDP) and of its communication hook.

    They are used where several processes train with ``parallel="ddp"``, which is the default there.

    Args:
        dim: The dimension along which DDP scatters inputs over the devices of one process. It has no effect where
            each process has one device, as here.
        broadcast_buffers: Copy the buffers of rank 0 to all ranks before each forward.
        bucket_cap_mb: The size of the buckets in which gradients are averaged, in MiB.
        find_unused_parameters: Look in each forward for parameters that the loss does not use. A model with such
            parameters needs it.
        check_reduction: Accepted and ignored, as in torch.
        gradient_as_bucket_view: Let gradients share memory with the buckets.
        static_graph: Promise that each step uses the same parameters.
        comm_hook: How gradients are compressed for the all-reduce; see ``DDPCommunicationHookType``.
        comm_wrapper: ``"fp16"`` or ``"bf16"``: send what the hook sends in this type.
        comm_state_option: Arguments of ``PowerSGDState``, for ``comm_hook="power_sgd"``.

    Raises:
        ConfigError: ``comm_hook`` or ``comm_wrapper`` is unknown.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, DistributedDataParallelKwargs

        handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        accelerator = Accelerator(kwargs_handlers=[handler])
        attention = torch.nn.MultiheadAttention(4, 1, batch_first=True)
        attention.register_parameter("unused", torch.nn.Parameter(torch.zeros(1)))
        model = accelerator.prepare(attention)
        x = torch.randn(2, 3, 4)
        accelerator.backward(model(x, x, x)[0].square().mean())
        ```
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook = parse_hook("comm_hook", self.comm_hook)
        self.comm_wrapper = parse_hook("comm_wrapper", self.comm_wrapper)


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of ``torch.amp.GradScaler``, the loss scale of ``mixed_precision="fp16"``.

    Args:
        init_scale: The loss scale of the first step.
        growth_factor: What the scale is multiplied by after ``growth_interval`` steps with finite gradients.
        backoff_factor: What it is multiplied by after a step with infinite gradients, which is skipped.
        growth_interval: The number of steps in a row with finite gradients after which the scale grows.
        enabled: False: the loss is not scaled.

    Examples:
        ```python
        from lockstep import Accelerator, GradScalerKwargs

        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
        assert accelerator.scaler.get_scale() == 1024.0
        ```
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of ``torch.distributed.init_process_group``.

    Args:
        backend: ``"gloo"``, ``"nccl"`` or another backend of torch. None: one that fits the device.
        init_method: A URL that tells the ranks where they meet. None: the variables of the launcher tell them.
        timeout: How long a collective may take. None: the backend's own limit.

    Examples:
        ```python
        from datetime import timedelta
        from lockstep import Accelerator, InitProcessGroupKwargs

        handler = InitProcessGroupKwargs(timeout=timedelta(minutes=5))
        assert handler.to_kwargs() == {"timeout": timedelta(minutes=5)}  # for a run that starts with it:
        # accelerator = Accelerator(kwargs_handlers=[handler])
        ```
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of ``torch.profiler.profile``, for ``accelerator.profile(...)``.

    Args:
        activities: What is recorded: ``"cpu"``, ``"cuda"``, ``"xpu"`` and so on. None: all that torch can record
            here.
        schedule_option: Arguments of ``torch.profiler.schedule``: ``wait``, ``warmup`` and ``active`` are numbers of
            steps. None: the whole block is recorded.
        on_trace_ready: A function that is called with the profiler at the end of each recorded cycle.
        record_shapes: Record the shapes of the operators' inputs.
        profile_memory: Record how tensors are allocated and freed.
        with_stack: Record the source lines of operators.
        with_flops: Estimate FLOPs of matrix products and convolutions.
        with_modules: Record the names of modules. torch does so for TorchScript models only.
        output_trace_dir: The folder in which each rank writes ``profile_<rank>.json`` when the block ends. None:
            nothing is written.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, ProfileKwargs

        accelerator = Accelerator()
        with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir="traces")):
            torch.randn(8, 8) @ torch.randn(8, 8)
        # traces/ has one file of each rank, for chrome://tracing or perfetto
        ```
    """

    activities: list[Literal["cpu", "cuda", "xpu", "mtia", "hpu"]] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., object] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None


@dataclass
class DamageChecks(KwargsHandler):
    """Checks for silent damage; all are off by default.

    - ``divergence_every``: the number of optimizer steps from one comparison to the next. It compares, bit for bit,
      the parameters of ranks that must hold the same ones. If some differ, all ranks raise ``DamageError``. 0: they
      are never compared.
    - ``bad_gradients``: what happens if gradients have NaN or infinity before a step. ``skip``: no rank makes the
      step. ``stop``: all ranks raise ``DamageError``. ``ignore``: gradients are not examined.
    - ``max_skips``: the number of steps in a row that may be skipped before all ranks stop.

    Raises:
        ConfigError: a number is negative, or ``bad_gradients`` is another word.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, DamageChecks

        checks = DamageChecks(bad_gradients="skip", divergence_every=100)
        assert checks.are_on
        accelerator = Accelerator(kwargs_handlers=[checks])
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.full((8, 4), float("nan"))).sum())
        optimizer.step()
        assert optimizer.step_was_skipped
        ```
    """

    divergence_every: int = 0
    bad_gradients: Literal["ignore", "skip", "stop"] = "ignore"
    max_skips: int = 10

    def __post_init__(self) -> None:
        check_between("divergence_every", self.divergence_every, 0, 2**31)
        check_between("max_skips", self.max_skips, 0, 2**31)
        check_word("bad_gradients", self.bad_gradients, ("ignore", "skip", "stop"))

    @property
    def are_on(self) -> bool:
        """Whether anything is checked."""
        return self.divergence_every > 0 or self.bad_gradients != "ignore"


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How ``accumulate`` joins micro-batches to optimizer steps.

    - ``num_steps``: the number of micro-batches in one optimizer step. None: the number that the flag, the
      environment or the file gives, or 1 if none of them does.
    - ``adjust_scheduler``: calls of a scheduler inside of the accumulation window count as torch's calls of ``step``,
      so that torch does not warn.
    - ``sync_with_dataloader``: the end of the loader ends the accumulation window, even if it is not full.
    - ``sync_each_batch``: gradients are averaged over the ranks at every micro-batch.

    Raises:
        ConfigError: ``num_steps`` is not a positive integer.

    Examples:
        ```python
        from lockstep import Accelerator, GradientAccumulationPlugin

        plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
        accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        assert accelerator.gradient_accumulation_steps == 4
        ```
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None:
            from lockstep.config.settings import OF_WORKERS  # which workers need only where it is said

            setting = OF_WORKERS["gradient_accumulation_steps"]
            self.num_steps = setting.kind.read(no_text(self.num_steps, setting.name), setting.name)


@dataclass
class DataLoaderConfiguration:
    """How ``prepare`` treats data loaders.

    - ``split_batches``: the ``batch_size`` of the loader is that of the global batch, and each rank takes a slice of
      it. Otherwise each rank gets batches of this size.
    - ``dispatch_batches``: rank 0 reads the data and sends each rank its slice. None: only for iterable datasets.
    - ``even_batches``: if the ranks would get different numbers of batches, the last round is completed with samples
      from the beginning. Iterable data is always completed. What rank 0 reads for all ranks is too, to equal slices
      of the remaining samples.
    - ``use_seedable_sampler``: in each epoch, a ``RandomSampler`` (``shuffle=True``) is seeded with seed + epoch. The
      seed is ``data_seed``, or torch's seed on rank 0. Otherwise samplers draw as without Lockstep.
    - ``data_seed``: without ``use_seedable_sampler``, any order, and the numbers that workers draw, depend only on
      this seed and on the epoch.
    - ``pin_memory``: batches are copied to a CUDA device through pinned host memory, and the host does not wait for the
      copies. If the loader has ``pin_memory=True``, its batches are pinned already. On a CPU it has no effect.
    - ``non_blocking``: the host does not wait for copies of batches that are not pinned, either.
    - ``use_stateful_dataloader``: accepted, and without effect: every prepared loader has ``state_dict()`` and an exact
      position.

    Raises:
        ConfigError: a switch is neither True nor False.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, DataLoaderConfiguration

        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=8))
        for batch in loader:
            assert len(batch) == 8 // accelerator.num_processes  # 8 rows over all ranks
        ```
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    pin_memory: bool = True

    def __post_init__(self) -> None:
        for name in ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking",
                     "use_stateful_dataloader", "pin_memory"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value not in (True, False):  # a text such as "false" would count as true
                raise ConfigError(f"{name} is {value!r}, which is not a truth value. Pass True or False.")


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of ``torch.compile`` for prepared models.

    Of ``backend``, ``mode``, ``fullgraph``, ``dynamic`` and ``use_regional_compilation``, those that are None are
    read from the environment, such as ``ACCELERATE_DYNAMO_MODE`` or ``LOCKSTEP_DYNAMO_MODE``.

    Args:
        backend: A backend of ``torch.compile``, such as ``"inductor"``. ``"no"``: models are not compiled.
        mode: ``"default"``, ``"reduce-overhead"`` or another mode of ``torch.compile``.
        fullgraph: Raise an error if a model does not compile to one graph.
        dynamic: Compile for all shapes, and not only for those that occur.
        options: Options of the backend: name -> value. torch takes either these or a mode.
        disable: Let ``torch.compile`` do nothing, to find out whether it is the cause of a problem.
        use_regional_compilation: Compile repeated blocks one by one. It takes less time than the whole model.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.utils import TorchDynamoPlugin

        plugin = TorchDynamoPlugin(backend="inductor", mode="reduce-overhead")
        assert plugin.compile_options()["mode"] == "reduce-overhead"
        accelerator = Accelerator(dynamo_plugin=plugin)  # compiles what prepare gets
        ```
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: dict[str, object] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        from lockstep.config.settings import OF_WORKERS  # they know these handlers
        from lockstep.config.sources import given_by_environment, inherited_environment

        environ = inherited_environment()
        for name, setting in (
            ("backend", "dynamo_backend"),
            ("mode", "dynamo_mode"),
            ("fullgraph", "dynamo_use_fullgraph"),
            ("dynamic", "dynamo_use_dynamic"),
            ("use_regional_compilation", "dynamo_use_regional_compilation"),
        ):
            is_open = getattr(self, name) is None
            given = given_by_environment(OF_WORKERS[setting], environ) if is_open else None
            if given is not None:
                setattr(self, name, given.value)

    def to_kwargs(self) -> dict[str, object]:
        """Return the options that differ from ``torch.compile``'s own defaults.

        Examples:
            ```python
            from lockstep.utils import TorchDynamoPlugin

            assert TorchDynamoPlugin(backend="eager", fullgraph=True).to_kwargs()["fullgraph"] is True
            ```
        """
        return {
            f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None and v is not f.default
        }

    def compile_options(self) -> dict[str, object]:
        """Return the keyword arguments of ``torch.compile``: name -> value, without the backend."""
        others = ("backend", "use_regional_compilation")
        return {name: value for name, value in self.to_kwargs().items() if name not in others}


@dataclass
class ProjectConfiguration:
    """Where a run writes its checkpoints and logs.

    - ``project_dir``: the folder of the run, which has the checkpoints.
    - ``logging_dir``: the folder of the trackers. None: ``project_dir``.
    - ``automatic_checkpoint_naming``: ``save_state`` writes ``checkpoints/checkpoint_<i>`` in ``project_dir``.
    - ``total_limit``: the number of these checkpoints that are kept. None: all of them.
    - ``iteration``: the number of the next checkpoint.
    - ``save_on_each_node``: ``save`` writes on one process of each machine, not on rank 0 only.

    Raises:
        ConfigError: ``total_limit`` is not a positive integer, or ``iteration`` is negative.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, ProjectConfiguration

        project = ProjectConfiguration("project", automatic_checkpoint_naming=True, total_limit=2)
        accelerator = Accelerator(project_config=project)
        model = accelerator.prepare(torch.nn.Linear(4, 1))
        folders = [accelerator.save_state() for _ in range(3)]  # the oldest is removed
        project.set_directories("project")  # what Accelerator(project_dir=...) does
        assert project.logging_dir == "project"
        ```
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)
        if self.total_limit is not None:
            self.total_limit = parse_integer(
                no_text(self.total_limit, "total_limit"), "total_limit", at_least=1
            )
        check_between("iteration", self.iteration, 0, 2**63)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set ``project_dir``, and also ``logging_dir`` where it has no value yet."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


def parse_hook(name: str, value: str) -> DDPCommunicationHookType:
    """Return the hook of this name; raises ConfigError if there is none."""
    check_word(name, value, DDPCommunicationHookType.list())
    return DDPCommunicationHookType(value)
