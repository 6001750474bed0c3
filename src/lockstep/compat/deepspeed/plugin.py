"""The plugin that describes DeepSpeed to ``Accelerator``, in our settings. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.compat.deepspeed.config import finish, from_deepspeed
from lockstep.compat.deepspeed.section import DEEPSPEED_KEYS
from lockstep.compat.rules import Translation, translate
from lockstep.config.json_file import read_json
from lockstep.config.merge import merge_settings
from lockstep.errors import ConfigError


@dataclass
class DeepSpeedPlugin:
    """A DeepSpeed configuration (a path, or a mapping), or its most used settings one by one.

    Without a configuration the stage is 2. After construction ``deepspeed_config`` is the configuration as a
    mapping, and ``zero_stage`` its stage.

    Raises:
        ConfigError: the file cannot be read.
    """

    hf_ds_config: object = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None
    deepspeed_config: Mapping[str, object] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        config = getattr(self.hf_ds_config, "config", self.hf_ds_config)
        if config is None or config == "none":
            self.zero_stage = 2 if self.zero_stage is None else self.zero_stage
            config = {"zero_optimization": {"stage": self.zero_stage}}
        elif isinstance(config, (str, Path)):
            config = read_json(config)
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"hf_ds_config is of type {type(config).__name__}. Give the path of a JSON file, or a mapping."
            )
        self.deepspeed_config = config
        zero = config.get("zero_optimization")
        if self.zero_stage is None and isinstance(zero, Mapping):
            self.zero_stage = zero.get("stage")


OWN_FIELDS = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "transformer_moe_cls_names",
    "enable_msamp",
)


def from_deepspeed_plugin(plugin: Any) -> Translation:
    """Translate an object with the fields of ``DeepSpeedPlugin``; its own fields and its file must agree.

    Raises:
        ConfigError: as ``from_deepspeed``, or fields and configuration contradict each other.
    """
    path = plugin.hf_ds_config
    where = str(path) if isinstance(path, (str, Path)) and path != "none" else "deepspeed_plugin"
    described = from_deepspeed(plugin.deepspeed_config, where)
    fields = {name: getattr(plugin, name, None) for name in OWN_FIELDS}
    own = translate(DEEPSPEED_KEYS, fields, "deepspeed_plugin")
    settings = finish(own)
    warnings = [*described.warnings, *own.warnings]
    rows = (*described.rows, *own.rows)
    return Translation(merge_settings(described.settings, settings), tuple(dict.fromkeys(warnings)), rows)


def the_plugin(plugin: object, plugins: object) -> Any:
    """The one DeepSpeed plugin of ``deepspeed_plugin`` and ``deepspeed_plugins``.

    Raises:
        ConfigError: several were given, or something else.
    """
    several = plugin if plugins is None else plugins
    if plugin is not None and plugins is not None:
        raise ConfigError("deepspeed_plugin and deepspeed_plugins were both given. Pass one of them.")
    if isinstance(several, Mapping):
        several = list(several.values())
    if isinstance(several, (list, tuple)):
        if len(several) != 1:
            raise ConfigError(
                f"deepspeed_plugins has {len(several)} plugins, but a run has one way of sharding. Pass one."
            )
        several = several[0]
    if several is not None and not hasattr(several, "hf_ds_config"):
        raise ConfigError(f"deepspeed_plugin is of type {type(several).__name__}. Pass a DeepSpeedPlugin.")
    return several
