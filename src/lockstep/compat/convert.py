"""A foreign configuration file as one of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lockstep.compat.accelerate.config_file import ONLY_IN_ACCELERATE, from_yaml
from lockstep.compat.deepspeed.config import from_deepspeed
from lockstep.compat.deepspeed.yaml_section import FILE_KEY
from lockstep.config.checks import ValuesByName
from lockstep.config.files import read_json
from lockstep.config.merge import (
    PARALLEL_FIELDS,
    merge_settings,
    parallel_of,
    precision_of,
    values_of_settings,
)
from lockstep.config.readers import SCALER_FIELDS
from lockstep.config.settings import REACHING_MACHINES, SETTINGS
from lockstep.config.values import SettingValue
from lockstep.config.world import BatchSizes, fitted
from lockstep.config.yaml_file import YamlFile, read_yaml
from lockstep.errors import ConfigError

Converted = tuple[dict[str, object], tuple[str, ...]]
"""Settings of ``RunConfig`` in plain data, and warnings of keys without effect."""


def convert(path: str | Path, ranks: int | None = None) -> Converted:
    """Read an Accelerate YAML or a DeepSpeed JSON; ``ranks`` is the number of processes, where the file needs it.

    Raises:
        ConfigError: the file cannot be read as either, or a key is unknown, refused or contradicts another one.
    """
    file = _accelerate_file(path)
    if file is None:
        described = from_deepspeed(path)
        return _settings(described.settings, {}, ranks), described.warnings
    loaded = from_yaml(file)
    given = loaded.config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    config_file = given.pop(FILE_KEY, None)
    warnings = tuple(loaded.warnings)
    asked: dict[str, SettingValue] = {}
    if config_file is not None:
        described = from_deepspeed(config_file)
        asked, warnings = dict(described.settings), (*warnings, *described.warnings)
    asked = merge_settings(
        asked, values_of_settings({name: (value, file.name) for name, value in given.items()})
    )
    return given | _settings(asked, given, ranks), warnings


def _accelerate_file(path: str | Path) -> YamlFile | None:
    """Return the file as YAML, or None when it is a DeepSpeed JSON."""
    if Path(path).suffix.lower() != ".json":
        return read_yaml(path)
    data = read_json(path)
    return YamlFile(str(path), data) if any(key in data for key in ONLY_IN_ACCELERATE) else None


def _settings(asked: Mapping[str, SettingValue], given: ValuesByName, ranks: int | None) -> dict[str, object]:
    """Return the settings of a file of ours that say the same.

    Raises:
        ConfigError: they contradict each other, or the batch sizes need the number of processes.
    """
    settings: dict[str, object] = {}
    processes = given.get("num_processes")
    if ranks is not None and processes is not None and ranks != processes:
        raise ConfigError(
            f"--ranks is {ranks}, but the file has num_processes {processes}. Leave out --ranks."
        )
    batch = BatchSizes.of(asked)
    processes = ranks or processes or _implied(batch)
    if batch.train is not None and processes is None:
        raise ConfigError(
            f"train_batch_size={batch.train} counts the rows of all processes, but the number of processes is "
            "not known. Give --ranks N."
        )
    if processes is not None:
        batch = fitted(parallel_of(asked), batch, processes)
        settings["num_processes"] = processes
    precision = precision_of(asked)
    if precision != "no":
        settings["mixed_precision"] = precision
    if any(name in asked for name in PARALLEL_FIELDS):
        settings["parallel"] = str(parallel_of(asked))
    if batch.accumulation is not None:
        settings["gradient_accumulation_steps"] = batch.accumulation
    if batch.micro is not None:
        settings["micro_batch_size"] = batch.micro
    if "gradient_clipping" in asked:
        settings["gradient_clipping"] = asked["gradient_clipping"].value
    settings |= {name: asked[name].value for name in REACHING_MACHINES if name in asked}
    for name in ("optimizer", "scheduler"):
        if name in asked and not isinstance(asked[name].value, dict):
            settings[name] = SETTINGS[name].kind.plain_data(asked[name].value)
    scaler = {name: asked[name].value for name in SCALER_FIELDS if name in asked}
    # With bf16 gradients are not scaled.
    if scaler and precision != "bf16":
        settings["grad_scaler"] = scaler
    return settings


def _implied(batch: BatchSizes) -> int | None:
    """Return the number of processes when the three batch sizes say it."""
    if batch.train is None or batch.micro is None or batch.accumulation is None:
        return None
    processes, rest = divmod(batch.train, batch.micro * batch.accumulation)
    return processes if processes and not rest else None
