"""What one ``Accelerator`` was asked for: by code, environment and files, merged and checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lockstep.config.arguments import RECIPES, AcceleratorArguments, handlers_by_type, refuse_two_answers
from lockstep.config.enums import Compile, DynamoBackend
from lockstep.config.fp8 import AORecipeKwargs, recipe_of
from lockstep.config.handlers import (
    AutocastKwargs,
    DamageChecks,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from lockstep.config.kinds import COMPILE_MODE
from lockstep.config.merge import (
    ExternalSettings,
    merge_settings,
    parallel_of,
    precision_of,
    values_of_parallel,
    values_of_settings,
)
from lockstep.config.parallel import Parallel
from lockstep.config.readers import OptimizerConfig, SchedulerConfig
from lockstep.config.settings import OF_WORKERS
from lockstep.config.sources import (
    is_launched,
    named_config_file,
    speaks_accelerate,
    unknown_variables,
    worker_settings,
)
from lockstep.config.spikes import SpikePolicy, checked_policy
from lockstep.config.values import SettingValue
from lockstep.config.world import BatchSizes, fitted

STEPS = OF_WORKERS["gradient_accumulation_steps"]
OF_GRAD_SCALER = tuple(item.name for item in fields(GradScalerKwargs))


@dataclass(frozen=True)
class Options:
    """Everything that one ``Accelerator`` was asked for.

    - ``gradient_clipping``: clip each step's gradients to this norm; None: only where the script does.
    - ``optimizer``, ``scheduler``: what a configuration describes, for objects that stand for them.
    - ``batch``: the batch sizes that were given; ``micro_batch_size``: rows that each process's batches must
      have, known after ``fit_to_world``; None: any.
    - ``spikes``: what is done at steps whose loss or gradient norm jumps; None: they are not looked for.
    - ``fp8``: how linear layers are converted; None: they are not.
    - ``deepspeed_plugins``: where there are several, each with its stage of ZeRO.
    - ``watch``: look for hangs and stop signals; ``grace_s``: from such a signal to the end of the process.
    - ``cpu_affinity``: run each process on the cores beside its GPU.
    - ``run_dir``: where rank 0 writes what it measures; None: nowhere. ``log_measures``: trackers get it, too.
    - ``given``: the settings that were given, by name, each with its source.
    - ``config_warnings``: what a configuration asks for in vain, to be said once by one process.
    """

    mixed_precision: str
    cpu: bool
    parallel: Parallel
    compile_options: dict[str, Any] | None
    compile_blocks: bool
    accumulation: GradientAccumulationPlugin
    loaders: DataLoaderConfiguration
    project: ProjectConfiguration
    ddp: DistributedDataParallelKwargs
    scaler: GradScalerKwargs
    init: InitProcessGroupKwargs
    autocast: AutocastKwargs
    profile: ProfileKwargs
    damage: DamageChecks
    rng_types: list[str]
    spikes: SpikePolicy | None = None
    fp8: AORecipeKwargs | None = None
    gradient_clipping: float | None = None
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    micro_batch_size: int | None = None
    batch: BatchSizes = field(default_factory=BatchSizes)
    config_warnings: tuple[str, ...] = ()
    deepspeed_plugin: object = None
    deepspeed_plugins: Mapping[str, tuple[object, int]] = field(default_factory=dict)
    fsdp_plugin: object = None
    parallelism_config: object = None
    watch: bool = OF_WORKERS["watch"].default
    grace_s: float = OF_WORKERS["grace"].default
    cpu_affinity: bool = OF_WORKERS["cpu_affinity"].default
    run_dir: Path | None = None
    log_measures: bool = False
    given: Mapping[str, SettingValue] = field(default_factory=dict)


def resolve_options(arguments: AcceleratorArguments, external: Callable[..., ExternalSettings]) -> Options:
    """Merge code, environment and defaults; plugins and DeepSpeed configurations must agree with these.

    ``external`` reads other libraries' words; it is called only where there are some.

    Raises:
        ConfigError: a value is unknown or contradicts another.
    """
    refuse_two_answers(arguments)
    settings = worker_settings(arguments.as_settings())
    handlers = handlers_by_type(arguments.kwargs_handlers or ())
    others = _others(arguments, settings, external)
    asked = merge_settings(others.settings, _given_by_code(arguments, settings, handlers))
    value = {name: setting.value for name, setting in asked.items()}
    parallel, precision = parallel_of(asked), precision_of(asked)
    project = arguments.project()
    compile_options, compile_blocks = _compiling(settings, arguments.dynamo_plugin, parallel)
    return Options(
        mixed_precision=precision,
        cpu=settings["cpu"].value,
        parallel=parallel,
        compile_options=compile_options,
        compile_blocks=compile_blocks,
        accumulation=_accumulation(arguments.gradient_accumulation_plugin, value),
        loaders=arguments.loaders(),
        project=project,
        ddp=handlers[DistributedDataParallelKwargs],
        scaler=replace(
            handlers[GradScalerKwargs], **{name: value[name] for name in OF_GRAD_SCALER if name in value}
        ),
        init=handlers[InitProcessGroupKwargs],
        autocast=handlers[AutocastKwargs],
        profile=handlers[ProfileKwargs],
        damage=handlers[DamageChecks],
        rng_types=["generator"] if arguments.rng_types is None else arguments.rng_types,
        spikes=checked_policy(handlers.get(SpikePolicy), handlers[DamageChecks]),
        fp8=recipe_of(next((handlers[kind] for kind in RECIPES if kind in handlers), None), precision),
        gradient_clipping=value.get("gradient_clipping") or None,
        optimizer=value.get("optimizer"),
        scheduler=value.get("scheduler"),
        batch=BatchSizes.of(asked),
        config_warnings=(*others.warnings, *(() if is_launched() else unknown_variables())),
        deepspeed_plugin=others.plugin,
        deepspeed_plugins=others.plugins,
        fsdp_plugin=arguments.fsdp_plugin,
        parallelism_config=arguments.parallelism_config,
        watch=settings["watch"].value,
        grace_s=settings["grace"].value,
        cpu_affinity=settings["cpu_affinity"].value,
        run_dir=_run_dir(settings["run_dir"].value, project.project_dir),
        log_measures=arguments.log_measures,
        given={
            name: setting
            for name, setting in (settings | asked).items()
            if setting.source != "default" and setting.value is not None
        },
    )


def _others(
    arguments: AcceleratorArguments,
    settings: Mapping[str, SettingValue],
    external: Callable[..., ExternalSettings],
) -> ExternalSettings:
    """Return what plugins, files and variables in the words of other libraries ask for."""
    foreign = (
        settings["deepspeed_config_file"].value,
        arguments.fsdp_plugin,
        arguments.deepspeed_plugin,
        arguments.deepspeed_plugins,
        arguments.parallelism_config,
    )
    return external(*foreign) if _has_foreign_words(foreign) else ExternalSettings({})


def _accumulation(
    plugin: GradientAccumulationPlugin | None, value: Mapping[str, Any]
) -> GradientAccumulationPlugin:
    plugin = plugin or GradientAccumulationPlugin()
    if plugin.num_steps is not None:
        return plugin
    return replace(plugin, num_steps=value.get(STEPS.name, STEPS.default))


def _has_foreign_words(plugins: Sequence[object]) -> bool:
    """Return whether there is anything in the words of other libraries: a plugin, a variable, a file that nobody has
    read."""
    has_unread_file = not is_launched() and named_config_file() is not None
    return has_unread_file or speaks_accelerate() or any(one is not None for one in plugins)


def _run_dir(given: str | None, project_dir: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder that was given, else ``run`` in the project's; None: "no", or a place that is not in a file
    system."""
    if given is None and project_dir is not None:
        given = os.path.join(os.fspath(project_dir), "run")
    if given is None or given == "no" or "://" in given:
        return None
    return Path(os.path.abspath(os.path.expanduser(given)))


def fit_to_world(options: Options, world_size: int) -> Options:
    """Return the options with the batch sizes that follow for so many processes.

    Raises:
        ConfigError: batch sizes, or the groups of ``parallel``, do not fit this number.
    """
    batch = fitted(options.parallel, options.batch, world_size)
    steps = batch.accumulation or options.accumulation.num_steps
    return replace(
        options,
        micro_batch_size=batch.micro,
        batch=batch,
        accumulation=replace(options.accumulation, num_steps=steps),
    )


def _compiling(
    settings: Mapping[str, SettingValue], plugin: TorchDynamoPlugin | None, parallel: Parallel
) -> tuple[dict[str, object] | None, bool]:
    """Arguments of ``torch.compile``, None if models are not compiled; whether each block is compiled by itself."""
    by_blocks = parallel.compile is Compile.BLOCKS
    backend = settings["dynamo_backend"].value
    if backend == "no" and by_blocks:
        backend = "inductor"
    if backend == "no":
        return None, False
    names = {"mode": "dynamo_mode", "fullgraph": "dynamo_use_fullgraph", "dynamic": "dynamo_use_dynamic"}
    found = {name: settings[setting].value for name, setting in names.items()}
    given = {name: value for name, value in found.items() if value is not None}
    own = plugin.compile_options() if plugin is not None else {}
    # Modes are inductor's words; another backend may have its own.
    if own.get("mode") is not None and str(backend).upper() in DynamoBackend.list():
        COMPILE_MODE.for_worker(own["mode"], "TorchDynamoPlugin(mode=...)")
    # torch.compile takes options only without a mode.
    if "options" in own:
        given.pop("mode", None)
    regional = bool(settings["dynamo_use_regional_compilation"].value)
    return {"backend": backend, **given, **own}, by_blocks or regional


def _given_by_code(
    arguments: AcceleratorArguments,
    settings: Mapping[str, SettingValue],
    handlers: Mapping[type, KwargsHandler],
) -> dict[str, SettingValue]:
    """Return what code and environment say, apart from plugins and files."""
    given = {
        name: (setting.value, setting.source)
        for name, setting in settings.items()
        if setting.source != "default" and name not in ("parallel", "deepspeed_config_file")
    }
    # `accelerate launch` always sets this variable, so that its "no" says nothing.
    precision = settings["mixed_precision"]
    if precision.value == "no" and precision.source.endswith("ACCELERATE_MIXED_PRECISION"):
        given.pop("mixed_precision")
    accumulation = arguments.gradient_accumulation_plugin
    if accumulation is not None and accumulation.num_steps is not None:
        given["gradient_accumulation_steps"] = (accumulation.num_steps, "gradient_accumulation_plugin")
    scaler = {
        name: SettingValue(value, f"GradScalerKwargs({name}={value})")
        for name, value in handlers[GradScalerKwargs].to_kwargs().items()
    }
    return values_of_settings(given) | _parallel_values(settings, arguments.parallel_fields) | scaler


def _parallel_values(
    settings: Mapping[str, SettingValue], given: Mapping[str, object]
) -> dict[str, SettingValue]:
    """Return ``parallel`` and its fields; those win over a ``parallel`` of the environment."""
    given = {name: value for name, value in given.items() if value is not None}
    if settings["parallel"].value is None and not given:
        return {}
    line, origin = settings["parallel"].value or Parallel(), settings["parallel"].source
    merged = line.merged(**given) if origin == "code" else replace(line, **given)
    values = values_of_parallel(merged, f"parallel='{line}' ({origin})")
    return values | {
        name: SettingValue(getattr(merged, name), f"{name}={value} (code)") for name, value in given.items()
    }
