"""A configuration file as an object with Accelerate's fields, as scripts that write such files use it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TypeAlias, TypeVar

import yaml

from lockstep.compat.accelerate.config_file import load
from lockstep.config.enums import ComputeEnvironment, DistributedType
from lockstep.config.files import JsonObject
from lockstep.config.sources import user_config_file
from lockstep.errors import ConfigError

Config = TypeVar("Config", bound="BaseConfig")
Section: TypeAlias = JsonObject | None
"""Keys of another library, with whatever it takes."""

ConfigPath: TypeAlias = str | os.PathLike[str]


def settings_of(path: ConfigPath | None) -> JsonObject:
    """What a configuration file says, checked; None: the one that ``lockstep config`` wrote.

    Raises:
        ConfigError: it cannot be read, or is no configuration.
    """
    path = user_config_file() if path is None else Path(path)
    load(path)
    settings: dict[str, object] = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    # YAML reads an unquoted NO as false.
    return {**settings, "distributed_type": "NO"} if settings.get("distributed_type") is False else settings


@dataclass
class BaseConfig:
    """What each file says.

    Raises:
        ValueError: an unknown environment or way to distribute.
    """

    compute_environment: ComputeEnvironment | str
    distributed_type: DistributedType | str
    mixed_precision: str | None
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        if isinstance(self.compute_environment, str):
            self.compute_environment = ComputeEnvironment(self.compute_environment)
        if isinstance(self.distributed_type, str):
            self.distributed_type = DistributedType(self.distributed_type)

    def to_dict(self) -> JsonObject:
        """The fields that say something, as plain values."""
        plain = {
            name: value.value if isinstance(value, Enum) else value for name, value in asdict(self).items()
        }
        return {name: value for name, value in plain.items() if value is not None and value != {}}

    def to_yaml_file(self, yaml_file: ConfigPath) -> None:
        Path(yaml_file).write_text(yaml.safe_dump(self.to_dict()), encoding="utf-8")

    def to_json_file(self, json_file: ConfigPath) -> None:
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"
        Path(json_file).write_text(text, encoding="utf-8")

    @classmethod
    def from_yaml_file(cls: type[Config], yaml_file: ConfigPath | None = None) -> Config:
        """Read a file; None: the one that ``lockstep config`` wrote. Raises ValueError for unknown keys."""
        return cls._read(yaml_file)

    @classmethod
    def from_json_file(cls: type[Config], json_file: ConfigPath | None = None) -> Config:
        """``from_yaml_file``: JSON is YAML."""
        return cls._read(json_file)

    @classmethod
    def unknown(cls, settings: Mapping[str, object]) -> list[str]:
        """Keys for which there is no field."""
        return sorted(settings.keys() - {known.name for known in fields(cls)})

    @classmethod
    def of(cls: type[Config], settings: Mapping[str, object]) -> Config:
        """What a file says, and what each such file must say where it does not."""
        standard: JsonObject = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "NO",
            "mixed_precision": "no",
            "use_cpu": False,
            "debug": False,
        }
        return cls(**{**standard, **settings})

    @classmethod
    def _read(cls: type[Config], path: ConfigPath | None) -> Config:
        settings = settings_of(path)
        unknown = cls.unknown(settings)
        if unknown:
            raise ConfigError(
                f"{path} has {', '.join(unknown)}, but {cls.__name__} has no such field. Read the file with "
                "load_config_from_file."
            )
        return cls.of(settings)


SECTIONS = (
    "deepspeed_config",
    "fsdp_config",
    "megatron_lm_config",
    "mpirun_config",
    "fp8_config",
    "parallelism_config",
    "dynamo_config",
)


@dataclass
class ClusterConfig(BaseConfig):
    """A file for machines of one's own. Fields of engines that are not used here are kept as they are."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: Section = None
    deepspeed_config: Section = None
    fsdp_config: Section = None
    parallelism_config: Section = None
    megatron_lm_config: Section = None
    mpirun_config: Section = None
    downcast_bf16: bool | str = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: Section = None

    def __post_init__(self) -> None:
        for name in SECTIONS:
            if getattr(self, name) is None:
                setattr(self, name, {})
        super().__post_init__()
