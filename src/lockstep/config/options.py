"""The arguments of ``Accelerator``, checked and completed before anything else looks at them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config.handlers import (
    AutocastKwargs,
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
from lockstep.config.parallel import Parallel
from lockstep.config.sources import suggestion, worker_settings
from lockstep.errors import ConfigError

HANDLERS = (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    AutocastKwargs,
    ProfileKwargs,
)

# Of Accelerate's Accelerator, for strategies that this version does not have.
LATER_OPTIONS = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fp8_recipe_handler",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "parallelism_config",
    "torch_tp_plugin",
)


@dataclass(frozen=True)
class Options:
    """Everything that one ``Accelerator`` was asked for."""

    mixed_precision: str
    cpu: bool
    parallel: Parallel
    compile_options: dict[str, Any] | None
    accumulation: GradientAccumulationPlugin
    loaders: DataLoaderConfiguration
    project: ProjectConfiguration
    ddp: DistributedDataParallelKwargs
    scaler: GradScalerKwargs
    init: InitProcessGroupKwargs
    autocast: AutocastKwargs
    profile: ProfileKwargs


class OptionsView:
    """What one ``Accelerator`` was asked for, under the names that scripts read."""

    _options: Options

    # Scripts ask for these; there are none.
    deepspeed_plugin: None = None
    parallelism_config: None = None
    is_fsdp2: bool = False
    is_composable_parallelism_enabled: bool = False

    @property
    def mixed_precision(self) -> str:
        return self._options.mixed_precision

    @property
    def project_configuration(self) -> ProjectConfiguration:
        return self._options.project

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        return self._options.loaders

    @property
    def project_dir(self) -> Any:
        return self._options.project.project_dir

    @property
    def logging_dir(self) -> Any:
        return self._options.project.logging_dir

    @property
    def save_iteration(self) -> int:
        return self._options.project.iteration

    @property
    def split_batches(self) -> bool:
        return self._options.loaders.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        return self._options.loaders.dispatch_batches

    @property
    def even_batches(self) -> bool:
        return self._options.loaders.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        """For loaders that are prepared from now on."""
        self._options.loaders.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        return self._options.loaders.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        return self._options.loaders.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        return self._options.loaders.use_stateful_dataloader


def resolve_options(
    *,
    mixed_precision: str | None,
    gradient_accumulation_steps: int | None,
    gradient_accumulation_plugin: GradientAccumulationPlugin | None,
    cpu: bool | None,
    parallel: str | None,
    dynamo_backend: str | None,
    dynamo_plugin: TorchDynamoPlugin | None,
    split_batches: bool | None,
    dataloader_config: DataLoaderConfiguration | None,
    project_dir: str | os.PathLike[str] | None,
    project_config: ProjectConfiguration | None,
    kwargs_handlers: Sequence[KwargsHandler] | None,
) -> Options:
    """Merge code, environment and defaults.

    Raises:
        ConfigError: a value is unknown or contradicts another.
    """
    if dynamo_plugin is not None and dynamo_backend is not None:
        raise ConfigError(
            f"dynamo_backend={dynamo_backend!r} and dynamo_plugin were both given. Pass only one of them."
        )
    steps = gradient_accumulation_steps
    if gradient_accumulation_plugin is not None and steps not in (
        None,
        1,
        gradient_accumulation_plugin.num_steps,
    ):
        raise ConfigError(
            f"gradient_accumulation_steps={steps} contradicts gradient_accumulation_plugin.num_steps="
            f"{gradient_accumulation_plugin.num_steps}. Pass only one of them."
        )
    settings = worker_settings(
        {
            "mixed_precision": mixed_precision,
            # 1 and False are the defaults of the signature that scripts know: the environment may say more.
            "gradient_accumulation_steps": None if steps == 1 else steps,
            "cpu": cpu or None,
            "parallel": parallel,
            "dynamo_backend": dynamo_plugin.backend if dynamo_plugin is not None else dynamo_backend,
        }
    )
    loaders = replace(dataloader_config or DataLoaderConfiguration())  # a copy: even_batches may be set later
    if split_batches:
        loaders = replace(loaders, split_batches=True)
    project = project_config or ProjectConfiguration()
    if project_dir is not None and project.project_dir is None:
        project.set_directories(project_dir)
    handlers = handlers_by_type(kwargs_handlers or ())
    return Options(
        mixed_precision=str(settings.mixed_precision),
        cpu=settings.cpu,
        parallel=Parallel.parse(settings.parallel),
        compile_options=None
        if settings.dynamo_backend == "no"
        else {
            "backend": settings.dynamo_backend,
            **(dynamo_plugin.compile_options() if dynamo_plugin else {}),
        },
        accumulation=gradient_accumulation_plugin
        or GradientAccumulationPlugin(num_steps=settings.gradient_accumulation_steps),
        loaders=loaders,
        project=project,
        ddp=handlers[DistributedDataParallelKwargs],
        scaler=handlers[GradScalerKwargs],
        init=handlers[InitProcessGroupKwargs],
        autocast=handlers[AutocastKwargs],
        profile=handlers[ProfileKwargs],
    )


def handlers_by_type(handlers: Sequence[KwargsHandler]) -> dict[type, Any]:
    """One handler of each kind, defaults where none was given.

    Raises:
        ConfigError: an unknown object, or two of one kind.
    """
    found: dict[type, Any] = {}
    for handler in handlers:
        kind = next((known for known in HANDLERS if isinstance(handler, known)), None)
        if kind is None:
            names = ", ".join(known.__name__ for known in HANDLERS)
            raise ConfigError(
                f"kwargs_handlers has an object of type {type(handler).__name__}. Pass any of {names}."
            )
        if kind in found:
            raise ConfigError(f"kwargs_handlers has two objects of type {kind.__name__}. Pass one.")
        found[kind] = handler
    return {kind: found.get(kind, kind()) for kind in HANDLERS}


def refuse_later_options(options: dict[str, Any], known: Iterable[str] = ()) -> None:
    """Options of Accelerate that this version does not have: refused by name rather than ignored.

    Raises:
        ConfigError: one of them has a value, or a name is no option at all.
    """
    for name, value in options.items():
        if name not in LATER_OPTIONS:
            raise ConfigError(
                f"Accelerator has no option {name!r}.{suggestion(name, known) or ' Remove it.'}"
            )
        if value is not None:
            raise ConfigError(
                f"{name} was given, but this version trains with data parallel only. "
                f"Remove {name}; the README's table says what works so far."
            )
