"""What DeepSpeed plugins ask for, in our settings; also those that ``transformers.Trainer`` made of its arguments.

Trainer asks DeepSpeed's engine to save, load and step its schedule, by methods that models do not have here. So it is
shown a model that FSDP shards, and does these itself. It accumulates and clips itself too: what the configuration says
of that has been compared with the training arguments. What is left says how the model is sharded, and its optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lockstep.compat.deepspeed.config import finish, from_deepspeed
from lockstep.compat.deepspeed.yaml_section import DEEPSPEED_KEYS
from lockstep.compat.rules import Translation, translate
from lockstep.config.merge import merge_settings
from lockstep.config.values import SettingValue
from lockstep.errors import ConfigError

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
    where = getattr(plugin, "_source", "deepspeed_plugin")
    by_trainer = is_of_trainer(plugin)
    config = left_by_trainer(plugin.hf_ds_config) if by_trainer else plugin.deepspeed_config
    described = from_deepspeed(config, where)
    fields = {name: getattr(plugin, name, None) for name in OWN_FIELDS}
    own = translate(DEEPSPEED_KEYS, fields, "deepspeed_plugin")
    settings = finish(own)
    warnings = [*described.warnings, *own.warnings]
    merged = merge_settings(described.settings, settings)
    return Translation(in_place_of_trainers(merged) if by_trainer else merged, tuple(dict.fromkeys(warnings)))


def named_plugins(plugin: object, plugins: object) -> dict[str, Any]:
    """Return the plugins of ``deepspeed_plugin`` and ``deepspeed_plugins`` by name; the first is the active one.

    Raises:
        ConfigError: both were given, an empty container, or something else.
    """
    several = plugin if plugins is None else plugins
    if plugin is not None and plugins is not None:
        raise ConfigError("deepspeed_plugin and deepspeed_plugins were both given. Pass one of them.")
    if several is None:
        return {}
    if isinstance(several, (list, tuple)):
        several = {f"plugin_{number}": one for number, one in enumerate(several)}
    found = dict(several) if isinstance(several, Mapping) else {"default": several}
    if not found:
        raise ConfigError("deepspeed_plugins has 0 plugins. Pass one or several plugins.")
    for one in found.values():
        if not hasattr(one, "hf_ds_config"):
            raise ConfigError(f"deepspeed_plugin is of type {type(one).__name__}. Pass a DeepSpeedPlugin.")
    return found


def stages_of(plugins: Mapping[str, object]) -> dict[str, tuple[Any, int]]:
    """Return each plugin with its stage; none where there are not several.

    Raises:
        ConfigError: they differ in more than that, or one shards nothing beside others.
    """
    if len(plugins) < 2:
        return {}
    settings = {name: from_deepspeed_plugin(one).settings for name, one in plugins.items()}
    first, *others = settings
    found = {
        name: (plugins[name], own["zero"].value if "zero" in own else 0) for name, own in settings.items()
    }
    for name in others:
        for key, value in settings[name].items():
            known = settings[first].get(key)
            if key != "zero" and (known is None or known.value != value.value):
                raise ConfigError(
                    f"deepspeed_plugins['{name}'] says {value.source}, but '{first}' "
                    f"{'does not' if known is None else f'says {known.source}'}. Give all plugins of one run the "
                    "same settings, apart from their stage."
                )
    for name, (_, stage) in found.items():
        if stage == 0:
            raise ConfigError(
                f"deepspeed_plugins['{name}'] has stage 0, but the other plugins shard the model. Give each "
                "plugin a stage from 1 to 3."
            )
    return found


# What Trainer was given ----------------------------------------------------------------------------------

DONE_BY_TRAINER = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)


def is_of_trainer(plugin: Any) -> bool:
    """Return whether the configuration in a ``DeepSpeedPlugin`` comes from the arguments of a Trainer."""
    return hasattr(plugin.hf_ds_config, "trainer_config_process")


def left_by_trainer(known: Any) -> dict[str, object]:
    """Return what of transformers' ``HfTrainerDeepSpeedConfig`` is for us.

    Raises:
        ConfigError: it contradicts the training arguments, or describes a schedule.
    """
    if known.mismatches:
        raise ConfigError(
            f"The DeepSpeed configuration contradicts the training arguments: {'; '.join(known.mismatches)}. Make them "
            "equal, or write 'auto' into the configuration."
        )
    schedule = known.config.get("scheduler")
    if schedule:
        kind = schedule.get("type") if isinstance(schedule, Mapping) else schedule
        raise ConfigError(
            f"The DeepSpeed configuration describes a scheduler of type {kind}, but Trainer makes and steps its own "
            "here. Remove the section 'scheduler', and pass lr_scheduler_type and warmup_steps: 'linear' falls as "
            "WarmupDecayLR does, 'constant_with_warmup' is WarmupLR with warmup_type 'linear'."
        )
    return {key: value for key, value in known.config.items() if key not in DONE_BY_TRAINER}


def in_place_of_trainers(settings: Mapping[str, SettingValue]) -> dict[str, SettingValue]:
    """Return the settings, whose optimizer takes the place of the one that Trainer makes."""
    optimizer = settings.get("optimizer")
    if optimizer is None or optimizer.value is None:
        return dict(settings)
    return {**settings, "optimizer": optimizer._replace(value=replace(optimizer.value, replaces=True))}
