"""Accelerate's YAML, and ours, to :class:`RunConfig`.

Every key that Accelerate writes is in one table: mapped, ignored, or refused by name while it asks for
something that does not exist here yet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from lockstep.compat.accelerate.sections import (
    DYNAMO_SECTION,
    FP8_SECTION,
    MPI_SECTION,
    read_section,
)
from lockstep.compat.rules import Translation, is_off
from lockstep.config.enums import ComputeEnvironment, DistributedType
from lockstep.config.merge import (
    PARALLEL_FIELDS,
    joined_sources,
    merge_settings,
    parallel_of,
    parallel_sources,
    values_of_settings,
)
from lockstep.config.run import RunConfig
from lockstep.config.settings import IN_FILES
from lockstep.config.values import SettingValue, repr_short, suggestion
from lockstep.config.yaml_file import YamlFile, read_yaml
from lockstep.errors import ConfigError


class Ignored(NamedTuple):
    """A key without effect here; ``why`` is said when it is switched on."""

    why: str


class Later(NamedTuple):
    """A key that is refused when it is switched on; ``instead`` is a sentence: what to do."""

    what: str
    instead: str = "Remove it, or leave it empty."


OTHER_KEYS: dict[str, Ignored | Later] = {
    "downcast_bf16": Ignored("it concerns TPUs only"),
    "tpu_env": Ignored("it concerns TPUs only"),
    "tpu_name": Ignored("it concerns TPUs only"),
    "tpu_zone": Ignored("it concerns TPUs only"),
    "tpu_vm": Ignored("it concerns TPUs only"),
    "commands": Ignored("it concerns TPU pods only"),
    "command_file": Ignored("it concerns TPU pods only"),
    "main_training_function": Ignored("it concerns TPUs only"),
    "same_network": Ignored("every machine meets at main_process_ip"),
    "use_mps_device": Ignored("devices are found automatically"),
    "ipex_config": Ignored("torch itself now has these optimisations"),
    "megatron_lm_config": Later(
        "Megatron-LM settings", "Remove it, and divide models by parallel, such as parallel: tp=2 pp=2."
    ),
    "tpu_use_cluster": Later("training on TPU pods"),
    "tpu_use_sudo": Later("training on TPU pods"),
}

# What Accelerate writes when nothing was asked.
DEFAULTS: dict[str, object] = {"main_training_function": "main", "same_network": True}

AVAILABLE_TYPES = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
    DistributedType.FSDP,
    DistributedType.DEEPSPEED,
)

# One process for each of a machine's devices; without one the script trains on the CPU.
DEVICE_TYPES = (DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)

# sections that say how models are spread -> what they ask for, and the distributed_type that they belong to
SECTIONS = {
    "fsdp_config": ("sharding (FSDP)", DistributedType.FSDP),
    "deepspeed_config": ("sharding (DeepSpeed)", DistributedType.DEEPSPEED),
    "parallelism_config": ("a layout of ranks", None),
    MPI_SECTION: ("launching by mpirun", None),
    DYNAMO_SECTION: ("compilation", None),
    FP8_SECTION: ("training in 8 bits", None),
}

ONLY_IN_ACCELERATE = ("compute_environment", "distributed_type")


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration file after checking; ``origins`` gives file and line of each setting that it has.

    ``words``: the key that each word of ``parallel`` comes from, where sections say them. ``gpus``: where the file
    asks for GPUs, or "".
    """

    config: RunConfig
    origins: dict[str, str]
    warnings: list[str] = field(default_factory=list)
    words: Mapping[str, str] = field(default_factory=dict)
    gpus: str = ""


def load(path: str | Path) -> LoadedConfig:
    """Read a configuration file, in Lockstep's or Accelerate's form.

    Raises:
        ConfigError: one message with file, line, key and the nearest valid name.
    """
    return from_yaml(read_yaml(path))


def from_yaml(file: YamlFile) -> LoadedConfig:
    """Read a file that is already parsed, as :func:`load` does."""
    try:
        return _loaded(file)
    except ConfigError as error:
        text = _with_lines(file, str(error))
        raise ConfigError(text if text.startswith(file.name) else f"{file.name}: {text}") from None


def _with_lines(file: YamlFile, message: str) -> str:
    """Return the message with the line of a key inside of a section, where it has that of the section."""
    for path in file.lines:
        section, key, at = (
            re.escape(file.at(path[0])),
            re.escape(path[-1]),
            file.at(*path).replace("\\", r"\\"),
        )
        if len(path) == 2 and path[1].isidentifier():
            message = re.sub(rf"{section}: '?{key}'?(?![\w-])", at, message)
            message = re.sub(rf"(?<![\w-])({key}=\S+) \({section}\)", rf"\1 ({at})", message)
    return message


def _loaded(file: YamlFile) -> LoadedConfig:
    values: dict[str, object] = {}
    file, warnings = _without_idle_keys(file)
    known = (*IN_FILES, *OTHER_KEYS, *SECTIONS, *ONLY_IN_ACCELERATE)
    for key, value in file.data.items():
        rule = OTHER_KEYS.get(key)
        if key in IN_FILES:
            if value is not None:
                values[key] = value
        elif key in ONLY_IN_ACCELERATE:
            _check_kind(file, key, value)
        elif key in SECTIONS:
            _check_section(file, key, value)
        elif isinstance(rule, Ignored):
            if not is_off(value) and value != DEFAULTS.get(key):
                warnings.append(f"{file.at(key)} has no effect: {rule.why}.")
        elif isinstance(rule, Later):
            if not is_off(value):
                raise ConfigError(
                    f"{file.at(key)} asks for {rule.what}, which is not available. {rule.instead}"
                )
        else:
            name = key if len(key) <= 60 else key[:57] + "..."
            near = suggestion(key, known) or f" Known keys: {', '.join(list(IN_FILES)[:8])} ..."
            at = f"{file.name}:{file.lines[(key,)]}"
            raise ConfigError(f"{at}: {name!r} is not a known key.{near}")
    _apply_type(file, values)
    gpus = file.at("distributed_type") if file.data.get("distributed_type") in DEVICE_TYPES else ""
    origins = _origins(file, values)
    config = _validate(file, values)
    spread = _spread(file, config)
    if not spread.settings:
        return LoadedConfig(config, origins, [*warnings, *spread.warnings], gpus=gpus)
    added, words = _settings(file, config, spread.settings)
    if "parallel" in added:
        origins["parallel"] = joined_sources(words)
    names = {"num_processes": "processes"}
    for key in added:
        given = spread.settings.get(names.get(key, key))
        if given is not None:
            origins.setdefault(key, given.source)
    return LoadedConfig(_validate(file, values | added), origins, [*warnings, *spread.warnings], words, gpus)


def _origins(file: YamlFile, values: dict[str, object]) -> dict[str, str]:
    """Return where each setting is said; those that a distributed_type implies are said there."""
    return {key: file.at(key if key in file.data else "distributed_type") for key in values}


def _without_idle_keys(file: YamlFile) -> tuple[YamlFile, list[str]]:
    """Return the file without keys that ``distributed_type: NO`` switches off, and a warning for each of them."""
    # YAML reads an unquoted NO as false.
    if file.data.get("distributed_type") not in (DistributedType.NO, False):
        return file, []
    idle = {
        key: f"Set {own.value} to shard."
        for key, (_, own) in SECTIONS.items()
        if own is not None and not is_off(file.data.get(key))
    }
    # Accelerate starts one process whatever the number.
    if file.data.get("num_processes") not in (None, 1, "1"):
        idle["num_processes"] = "Set MULTI_CPU or MULTI_GPU for several processes."
    data = {key: value for key, value in file.data.items() if key not in idle}
    return replace(file, data=data), [
        f"{file.at(key)} has no effect: distributed_type is NO. {instead}" for key, instead in idle.items()
    ]


def _check_section(file: YamlFile, key: str, value: object) -> None:
    """Check that a section that asks for something is one, and belongs to the distributed_type."""
    if is_off(value):
        return
    if not isinstance(value, dict):
        raise ConfigError(
            f"{file.at(key)} is {repr_short(value)}, but must be a section of keys. Write keys and values below it."
        )
    what, own = SECTIONS[key]
    kind = file.data.get("distributed_type")
    if own is not None and kind not in (None, own):
        kind = kind if kind else DistributedType.NO.value
        raise ConfigError(
            f"{file.at(key)} asks for {what}, but distributed_type is {kind}. "
            f"Set distributed_type: {own.value}, or remove {key}."
        )


def _spread(file: YamlFile, config: RunConfig) -> Translation:
    """Return what the sections say together, and a distributed_type without its section."""
    kind = file.data.get("distributed_type")
    written = {key: file.data[key] for key in SECTIONS if isinstance(file.data.get(key), dict)}
    given = {key: section for key, section in written.items() if not is_off(section)}
    if "fsdp_config" in given and "deepspeed_config" in given:
        raise ConfigError(
            f"{file.at('fsdp_config')} and {file.at('deepspeed_config')} both shard the model. Remove one of them."
        )
    parts: list[Translation] = []
    for key, (_, own) in SECTIONS.items():
        if key in given or (own is not None and kind == own):
            where = file.at(key if key in file.data else "distributed_type")
            parts.append(read_section(key, written.get(key, {}), where, config.num_machines, alone=not parts))
    # Such a section asks for nothing, but a misspelt key may mean more.
    for key in written.keys() - given.keys():
        read_section(key, written[key], file.at(key))
    asked = merge_settings(*(part.settings for part in parts))
    return Translation(asked, tuple(text for part in parts for text in part.warnings))


def _settings(
    file: YamlFile, config: RunConfig, asked: Mapping[str, SettingValue]
) -> tuple[dict[str, object], dict[str, str]]:
    """Return the settings of ``RunConfig`` that follow, and the source of each word of ``parallel``.

    The file's own keys must agree with them.
    """
    given = {name: (value, file.at(name)) for name, value in config.given().items()}
    own = values_of_settings(given)
    if config.num_processes is not None:
        own["processes"] = SettingValue(
            config.num_processes, f"num_processes={config.num_processes} ({file.name})"
        )
    together = merge_settings(asked, own)
    parallel = parallel_of(together)
    settings = {name: setting.value for name, setting in together.items() if name in IN_FILES}
    if any(name in together for name in PARALLEL_FIELDS):
        settings["parallel"] = str(parallel)
    if "processes" in together:
        settings["num_processes"] = together["processes"].value
    return settings, parallel_sources(together)


def _check_kind(file: YamlFile, key: str, value: object) -> None:
    words = ComputeEnvironment.list() if key == "compute_environment" else DistributedType.list()
    # YAML reads an unquoted NO as false.
    if key == "distributed_type" and value is False:
        return
    if not isinstance(value, str) or value not in words:
        near = suggestion(value, words) if isinstance(value, str) else ""
        raise ConfigError(f"{file.at(key)}: {repr_short(value)} is not one of {', '.join(words)}.{near}")
    if value == ComputeEnvironment.AMAZON_SAGEMAKER:
        raise ConfigError(
            f"{file.at(key)}: {value} is not available. Use {ComputeEnvironment.LOCAL_MACHINE}."
        )
    if key == "distributed_type" and value not in AVAILABLE_TYPES:
        divided = ", and divide models by parallel, such as parallel: tp=2 pp=2"
        raise ConfigError(
            f"{file.at(key)}: {value} is not available. Use one of {', '.join(AVAILABLE_TYPES)}"
            f"{divided if value == DistributedType.MEGATRON_LM else ''}."
        )


def _apply_type(file: YamlFile, values: dict[str, object]) -> None:
    """Add what ``distributed_type`` says beyond the other keys, and refuse what contradicts it."""
    kind = file.data.get("distributed_type")
    if kind == DistributedType.MULTI_CPU:
        values.setdefault("use_cpu", True)
    if kind in (DistributedType.NO, False):
        values.setdefault("num_processes", 1)
    if kind in DEVICE_TYPES and values.get("use_cpu") is True:
        raise ConfigError(
            f"{file.at('use_cpu')} is true but distributed_type is {kind}. Set MULTI_CPU, or use_cpu: false."
        )


def _validate(file: YamlFile, values: dict[str, object]) -> RunConfig:
    try:
        return RunConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        path = tuple(str(part) for part in first["loc"])[:1]
        cause = first.get("ctx", {}).get("error")
        reason = str(cause) if isinstance(cause, ConfigError) else first["msg"]
        # Several keys together: the message begins with the one whose line is shown.
        if not path:
            line = file.lines.get((reason.split(" ", 1)[0],), 1)
            raise ConfigError(f"{file.name}:{line}: {_sentence(reason)}") from None
        reason = reason.removeprefix(path[0] + "=").strip()
        raise ConfigError(f"{file.at(*path)}: {_sentence(reason)}") from None


def _sentence(reason: str) -> str:
    return reason if reason.endswith((".", "?")) else reason + "."
