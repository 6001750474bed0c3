"""What a script passes to ``Accelerator``, as typed values; what can be refused by itself is refused here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lockstep.config.fp8 import AORecipeKwargs, TERecipeKwargs
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
from lockstep.config.merge import PARALLEL_FIELDS
from lockstep.config.parallel import Parallel
from lockstep.config.spikes import SpikePolicy
from lockstep.config.values import suggestion
from lockstep.errors import ConfigError

HANDLERS = (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    AutocastKwargs,
    ProfileKwargs,
    DamageChecks,
)
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


@dataclass(frozen=True, kw_only=True)
class AcceleratorArguments:
    """The arguments of ``Accelerator`` that are settings; its docstring describes each.

    - ``parallel_fields``: fields of ``Parallel`` that were passed one by one.
    """

    mixed_precision: str | None = None
    gradient_accumulation_steps: int | None = 1
    gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    cpu: bool | None = False
    parallel: str | Parallel | Mapping[str, object] | None = None
    parallel_fields: Mapping[str, object] = field(default_factory=dict)
    parallelism_config: object = None
    fsdp_plugin: object = None
    deepspeed_plugin: object = None
    deepspeed_plugins: object = None
    dynamo_backend: str | None = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    split_batches: bool | None = None
    dataloader_config: DataLoaderConfiguration | None = None
    rng_types: list[str] | None = None
    project_dir: str | os.PathLike[str] | None = None
    project_config: ProjectConfiguration | None = None
    kwargs_handlers: Sequence[KwargsHandler] | None = None
    watch: bool | None = None
    run_dir: str | os.PathLike[str] | None = None
    log_measures: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any], **others: Any) -> AcceleratorArguments:
        """Return those among ``given`` arguments, and ``others`` in place of theirs."""
        own = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in own} | others)

    @property
    def asks_for_sharding(self) -> bool:
        """Whether anything says how models are spread."""
        asked = (
            self.parallel,
            self.parallelism_config,
            self.fsdp_plugin,
            self.deepspeed_plugin,
            self.deepspeed_plugins,
        )
        return any(one is not None for one in asked)

    def as_settings(self) -> dict[str, object]:
        """Return the arguments that flags, environment and files may set, too; None: the code does not say."""
        steps, plugin = self.gradient_accumulation_steps, self.dynamo_plugin
        return {
            "mixed_precision": self.mixed_precision,
            # 1 and False are the defaults of the signature that scripts know: the environment may say more.
            "gradient_accumulation_steps": None if steps == 1 else steps,
            "cpu": self.cpu or None,
            "parallel": self.parallel,
            "watch": self.watch,
            "run_dir": None if self.run_dir is None else os.fspath(self.run_dir),
            "dynamo_backend": self.dynamo_backend if plugin is None else plugin.backend,
            "dynamo_use_regional_compilation": getattr(plugin, "use_regional_compilation", None),
        }

    def loaders(self) -> DataLoaderConfiguration:
        """Return a copy of ``dataloader_config``, because ``even_batches`` may be set later."""
        loaders = replace(self.dataloader_config or DataLoaderConfiguration())
        return replace(loaders, split_batches=True) if self.split_batches else loaders

    def project(self) -> ProjectConfiguration:
        """Return ``project_config`` itself, which gets ``project_dir`` if it has no directory."""
        project = self.project_config or ProjectConfiguration()
        if self.project_dir is not None and project.project_dir is None:
            project.set_directories(self.project_dir)
        return project


def refuse_two_answers(arguments: AcceleratorArguments) -> None:
    """Refuse two arguments that say the same thing, or contradict each other.

    Raises:
        ConfigError: both were passed.
    """
    backend, steps = arguments.dynamo_backend, arguments.gradient_accumulation_steps
    if arguments.dynamo_plugin is not None and backend is not None:
        raise ConfigError(
            f"dynamo_backend={backend!r} and dynamo_plugin were both given. Pass only one of them."
        )
    plugin = arguments.gradient_accumulation_plugin
    if plugin is not None and plugin.num_steps not in (None, steps) and steps not in (None, 1):
        raise ConfigError(
            f"gradient_accumulation_steps={steps} contradicts gradient_accumulation_plugin.num_steps="
            f"{plugin.num_steps}. Pass only one of them."
        )


def handlers_by_type(handlers: Sequence[KwargsHandler]) -> dict[type, Any]:
    """Return one handler of each kind, defaults where none was given; of recipes for fp8 and policies only what was
    given.

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
    """Return the fields of ``Parallel`` among further options; others of Accelerate are refused by name.

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
