"""The arguments of ``Accelerator``, checked and completed before anything else looks at them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lockstep.config.enums import Compile, DynamoBackend
from lockstep.config.fp8 import AORecipeKwargs, TERecipeKwargs, recipe_of
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
    PARALLEL_FIELDS,
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
from lockstep.config.values import SettingValue, suggestion
from lockstep.config.world import BatchSizes, fitted
from lockstep.errors import ConfigError

HANDLERS = (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    AutocastKwargs,
    ProfileKwargs,
    DamageChecks,
)
STEPS = OF_WORKERS["gradient_accumulation_steps"]
RECIPES = (AORecipeKwargs, TERecipeKwargs)
WITHOUT_DEFAULTS = (*RECIPES, SpikePolicy)

# Of Accelerate's Accelerator: what it asks for, and what to do.
NOT_OPTIONS = {
    "fp8_recipe_handler": (
        "fp8 training",
        "is set by mixed_precision='fp8'. Remove it, and pass AORecipeKwargs() in kwargs_handlers",
    ),
    "megatron_lm_plugin": (
        "Megatron-LM",
        "is not used here. Remove it, and write parallel='tp=2 pp=2', for instance",
    ),
    "torch_tp_plugin": (
        "tensor parallelism",
        "is set by parallel=. Remove it, and write parallel='tp=2', for instance",
    ),
}


@dataclass(frozen=True)
class Options:
    """Everything that one ``Accelerator`` was asked for.

    - ``gradient_clipping``: clip each step's gradients to this norm; None: only where the script does.
    - ``optimizer``, ``scheduler``: what a configuration describes, for objects that stand for them.
    - ``batch``: the batch sizes that were said; ``micro_batch_size``: rows that each process's batches must
      have, known after ``fit_to_world``; None: any.
    - ``spikes``: what is done at steps whose loss or gradient norm jumps; None: they are not looked for.
    - ``fp8``: how linear layers are converted; None: they are not.
    - ``deepspeed_plugins``: where there are several, each with its stage of ZeRO.
    - ``watch``: look for hangs and stop signals; ``grace_s``: from such a signal to the end of the process.
    - ``cpu_affinity``: run each process on the cores beside its GPU.
    - ``run_dir``: where rank 0 writes what it measures; None: nowhere. ``log_measures``: trackers get it, too.
    - ``said``: the settings that were said, by name, each with its source.
    - ``config_warnings``: what a configuration asks for in vain, to be said once by one process.
    """

    mixed_precision: str
    cpu: bool
    parallel: Parallel
    compile_options: dict[str, object] | None
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
    said: Mapping[str, SettingValue] = field(default_factory=dict)


def resolve_options(
    *,
    mixed_precision: str | None,
    gradient_accumulation_steps: int | None,
    gradient_accumulation_plugin: GradientAccumulationPlugin | None,
    cpu: bool | None,
    parallel: str | Parallel | Mapping[str, object] | None,
    dynamo_backend: str | None,
    dynamo_plugin: TorchDynamoPlugin | None,
    split_batches: bool | None,
    dataloader_config: DataLoaderConfiguration | None,
    project_dir: str | os.PathLike[str] | None,
    project_config: ProjectConfiguration | None,
    kwargs_handlers: Sequence[KwargsHandler] | None,
    parallel_fields: Mapping[str, object] | None = None,
    fsdp_plugin: object = None,
    deepspeed_plugin: object = None,
    deepspeed_plugins: object = None,
    parallelism_config: object = None,
    watch: bool | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    log_measures: bool = False,
    external: Callable[..., ExternalSettings],
) -> Options:
    """Merge code, environment and defaults; plugins and DeepSpeed configurations must agree with these.

    ``parallel_fields`` are fields of ``Parallel`` given one by one. ``external`` reads other libraries' words; it is
    called only where there are some.

    Raises:
        ConfigError: a value is unknown or contradicts another.
    """
    steps = gradient_accumulation_steps
    _refuse_two_answers(dynamo_backend, dynamo_plugin, steps, gradient_accumulation_plugin)
    settings = worker_settings(
        {
            "mixed_precision": mixed_precision,
            # 1 and False are the defaults of the signature that scripts know: the environment may say more.
            "gradient_accumulation_steps": None if steps == 1 else steps,
            "cpu": cpu or None,
            "parallel": parallel,
            "watch": watch,
            "run_dir": None if run_dir is None else os.fspath(run_dir),
            "dynamo_backend": dynamo_plugin.backend if dynamo_plugin is not None else dynamo_backend,
            "dynamo_use_regional_compilation": getattr(dynamo_plugin, "use_regional_compilation", None),
        }
    )
    loaders = replace(dataloader_config or DataLoaderConfiguration())  # a copy: even_batches may be set later
    if split_batches:
        loaders = replace(loaders, split_batches=True)
    project = project_config or ProjectConfiguration()
    if project_dir is not None and project.project_dir is None:
        project.set_directories(project_dir)
    handlers = handlers_by_type(kwargs_handlers or ())
    code = _said_by_code(settings, parallel_fields or {}, gradient_accumulation_plugin, handlers)
    foreign = (
        settings["deepspeed_config_file"].value,
        fsdp_plugin,
        deepspeed_plugin,
        deepspeed_plugins,
        parallelism_config,
    )
    others = external(*foreign) if _has_foreign_words(foreign) else ExternalSettings({})
    asked = merge_settings(others.settings, code)
    value = {name: said.value for name, said in asked.items()}
    accumulation = gradient_accumulation_plugin or GradientAccumulationPlugin()
    if accumulation.num_steps is None:
        accumulation = replace(accumulation, num_steps=value.get(STEPS.name, STEPS.default))
    parallel = parallel_of(asked)
    by_blocks = parallel.compile is Compile.BLOCKS
    compiling = _compile_options(settings, dynamo_plugin, "inductor" if by_blocks else "no")
    return Options(
        mixed_precision=precision_of(asked),
        cpu=settings["cpu"].value,
        parallel=parallel,
        compile_options=compiling,
        compile_blocks=compiling is not None
        and (by_blocks or bool(settings["dynamo_use_regional_compilation"].value)),
        accumulation=accumulation,
        loaders=loaders,
        project=project,
        ddp=handlers[DistributedDataParallelKwargs],
        scaler=replace(
            handlers[GradScalerKwargs], **{name: value[name] for name in SCALER_FIELDS if name in value}
        ),
        init=handlers[InitProcessGroupKwargs],
        autocast=handlers[AutocastKwargs],
        profile=handlers[ProfileKwargs],
        damage=handlers[DamageChecks],
        spikes=checked_policy(handlers.get(SpikePolicy), handlers[DamageChecks]),
        fp8=recipe_of(
            next((handlers[kind] for kind in RECIPES if kind in handlers), None), precision_of(asked)
        ),
        gradient_clipping=value.get("gradient_clipping") or None,
        optimizer=value.get("optimizer"),
        scheduler=value.get("scheduler"),
        batch=BatchSizes.of(asked),
        config_warnings=(*others.warnings, *(() if is_launched() else unknown_variables())),
        deepspeed_plugin=others.plugin,
        deepspeed_plugins=others.plugins,
        fsdp_plugin=fsdp_plugin,
        parallelism_config=parallelism_config,
        watch=settings["watch"].value,
        grace_s=settings["grace"].value,
        cpu_affinity=settings["cpu_affinity"].value,
        run_dir=_run_dir(settings["run_dir"].value, project.project_dir),
        log_measures=log_measures,
        said={
            name: said
            for name, said in (settings | asked).items()
            if said.source != "default" and said.value is not None
        },
    )


def _refuse_two_answers(
    dynamo_backend: str | None,
    dynamo_plugin: TorchDynamoPlugin | None,
    steps: int | None,
    accumulation: GradientAccumulationPlugin | None,
) -> None:
    if dynamo_plugin is not None and dynamo_backend is not None:
        raise ConfigError(
            f"dynamo_backend={dynamo_backend!r} and dynamo_plugin were both given. Pass only one of them."
        )
    if accumulation is not None and accumulation.num_steps not in (None, steps) and steps not in (None, 1):
        raise ConfigError(
            f"gradient_accumulation_steps={steps} contradicts gradient_accumulation_plugin.num_steps="
            f"{accumulation.num_steps}. Pass only one of them."
        )


def _has_foreign_words(plugins: Sequence[object]) -> bool:
    """Whether there is anything in the words of other libraries: a plugin, a variable, a file that nobody has read."""
    has_unread_file = not is_launched() and named_config_file() is not None
    return has_unread_file or speaks_accelerate() or any(one is not None for one in plugins)


def _run_dir(said: str | None, project_dir: str | os.PathLike[str] | None) -> Path | None:
    """The folder that was said, else ``run`` in the project's; None: "no", or a place that is not in a file system."""
    if said is None and project_dir is not None:
        said = os.path.join(os.fspath(project_dir), "run")
    if said is None or said == "no" or "://" in said:
        return None
    return Path(os.path.abspath(os.path.expanduser(said)))


SCALER_FIELDS = tuple(item.name for item in fields(GradScalerKwargs))


def fit_to_world(options: Options, world_size: int) -> Options:
    """The options with the batch sizes that follow for so many processes.

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


def _compile_options(
    settings: Mapping[str, SettingValue], plugin: TorchDynamoPlugin | None, default: str
) -> dict[str, object] | None:
    """Arguments of ``torch.compile``: what the plugin says, else the settings; None: models are left as they are.

    ``default``: the backend where none is said, or ``no``.
    """
    backend = settings["dynamo_backend"].value
    backend = default if backend == "no" else backend
    if backend == "no":
        return None
    names = {"mode": "dynamo_mode", "fullgraph": "dynamo_use_fullgraph", "dynamic": "dynamo_use_dynamic"}
    found = {name: settings[setting].value for name, setting in names.items()}
    said = {name: value for name, value in found.items() if value is not None}
    own = plugin.compile_options() if plugin is not None else {}
    if own.get("mode") is not None and str(backend).upper() in DynamoBackend.list():  # others have their own
        COMPILE_MODE.for_worker(own["mode"], "TorchDynamoPlugin(mode=...)")
    if "options" in own:  # which torch.compile takes only without a mode
        said.pop("mode", None)
    return {"backend": backend, **said, **own}


def _said_by_code(
    settings: Mapping[str, SettingValue],
    parallel_fields: Mapping[str, object],
    accumulation: GradientAccumulationPlugin | None,
    handlers: Mapping[type, KwargsHandler],
) -> dict[str, SettingValue]:
    """What code and environment say, apart from plugins and files."""
    given = {
        name: (setting.value, setting.source)
        for name, setting in settings.items()
        if setting.source != "default" and name not in ("parallel", "deepspeed_config_file")
    }
    # `accelerate launch` always sets this variable, so that its "no" says nothing
    precision = settings["mixed_precision"]
    if precision.value == "no" and precision.source.endswith("ACCELERATE_MIXED_PRECISION"):
        given.pop("mixed_precision")
    if accumulation is not None and accumulation.num_steps is not None:
        given["gradient_accumulation_steps"] = (accumulation.num_steps, "gradient_accumulation_plugin")
    scaler = {
        name: SettingValue(value, f"GradScalerKwargs({name}={value})")
        for name, value in handlers[GradScalerKwargs].to_kwargs().items()
    }
    return values_of_settings(given) | _parallel_values(settings, parallel_fields) | scaler


def _parallel_values(
    settings: Mapping[str, SettingValue], given: Mapping[str, object]
) -> dict[str, SettingValue]:
    """``parallel`` and its fields; those win over a ``parallel`` of the environment."""
    given = {name: value for name, value in given.items() if value is not None}
    if settings["parallel"].value is None and not given:
        return {}
    line, origin = settings["parallel"].value or Parallel(), settings["parallel"].source
    merged = line.merged(**given) if origin == "code" else replace(line, **given)
    said = values_of_parallel(merged, f"parallel='{line}' ({origin})")
    return said | {
        name: SettingValue(getattr(merged, name), f"{name}={value} (code)") for name, value in given.items()
    }


def handlers_by_type(handlers: Sequence[KwargsHandler]) -> dict[type, Any]:
    """One handler of each kind, defaults where none was given; of recipes for fp8 and policies only what was given.

    Raises:
        ConfigError: an unknown object, or two of one kind.
    """
    found: dict[type, object] = {}
    for handler in handlers:
        kind = next((known for known in (*HANDLERS, *WITHOUT_DEFAULTS) if isinstance(handler, known)), None)
        if kind is None:
            names = ", ".join(known.__name__ for known in (*HANDLERS, *WITHOUT_DEFAULTS))
            raise ConfigError(
                f"kwargs_handlers has an object of type {type(handler).__name__}. Pass any of {names}."
            )
        if kind in found:
            raise ConfigError(f"kwargs_handlers has two objects of type {kind.__name__}. Pass one.")
        found[kind] = handler
    return found | {kind: found.get(kind, kind()) for kind in HANDLERS}


def parallel_fields(options: Mapping[str, object], known: Iterable[str] = ()) -> dict[str, object]:
    """The fields of ``Parallel`` among further options; others of Accelerate are refused by name.

    Raises:
        ConfigError: an option is not available and has a value, or a name is no option at all.
    """
    found: dict[str, object] = {}
    for name, value in options.items():
        if name in PARALLEL_FIELDS:
            found[name] = value
        elif name not in NOT_OPTIONS:
            near = suggestion(name, [*known, *PARALLEL_FIELDS])
            raise ConfigError(f"Accelerator has no option {name!r}.{near or ' Remove it.'}")
        elif value is not None:
            what, instead = NOT_OPTIONS[name]
            raise ConfigError(f"{name} was given, which asks for {what}. That {instead}.")
    return found
