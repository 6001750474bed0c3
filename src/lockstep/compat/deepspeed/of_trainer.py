"""A DeepSpeed configuration that ``transformers.Trainer`` was given: ``TrainingArguments(deepspeed=...)``.

Trainer asks DeepSpeed's engine to save, load and step its schedule, by methods that models do not have here. So it is
shown a model that FSDP shards, and does these itself. It accumulates and clips itself too: what the configuration says
of that has been compared with the training arguments. What is left says how the model is sharded, and its optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lockstep.config.values import SettingValue
from lockstep.errors import ConfigError

DONE_BY_TRAINER = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)


def is_of_trainer(plugin: Any) -> bool:
    """Whether the configuration in a ``DeepSpeedPlugin`` comes from the arguments of a Trainer."""
    return hasattr(plugin.hf_ds_config, "trainer_config_process")


def left_by_trainer(known: Any) -> dict[str, object]:
    """What of transformers' ``HfTrainerDeepSpeedConfig`` is for us.

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
    """The settings, whose optimizer takes the place of the one that Trainer makes."""
    said = settings.get("optimizer")
    if said is None or said.value is None:
        return dict(settings)
    return {**settings, "optimizer": said._replace(value=replace(said.value, replaces=True))}
