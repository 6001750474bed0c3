"""A foreign configuration file as one of ours, with a row for what became of each key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.compat.accelerate import sections
from lockstep.compat.accelerate.config_file import (
    DEFAULTS,
    ONLY_IN_ACCELERATE,
    OTHER_KEYS,
    Ignored,
    from_yaml,
)
from lockstep.compat.deepspeed import keys as deepspeed_keys
from lockstep.compat.deepspeed.config import from_deepspeed
from lockstep.compat.deepspeed.yaml_section import DEEPSPEED_KEYS, FILE_KEY
from lockstep.compat.fsdp import section as fsdp
from lockstep.compat.rules import Outcome, Row, Table, is_off, walk
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
from lockstep.config.settings import IN_FILES, REACHING_MACHINES, SETTINGS
from lockstep.config.values import SettingValue
from lockstep.config.world import BatchSizes, fitted
from lockstep.config.yaml_file import YamlFile, read_yaml
from lockstep.errors import ConfigError

SECTION_TABLES: dict[str, Table] = {
    "fsdp_config": {**fsdp.KEYS, **{fsdp.PREFIX + key: rule for key, rule in fsdp.KEYS.items()}},
    "deepspeed_config": DEEPSPEED_KEYS,
    sections.MPI_SECTION: sections.MPI_KEYS,
    sections.DYNAMO_SECTION: {
        **sections.DYNAMO_KEYS,
        **{sections.DYNAMO_PREFIX + key: rule for key, rule in sections.DYNAMO_KEYS.items()},
    },
    "parallelism_config": {
        **sections.LAYOUT_KEYS,
        **{sections.LAYOUT_PREFIX + key: rule for key, rule in sections.LAYOUT_KEYS.items()},
    },
}


@dataclass(frozen=True)
class ConvertedConfig:
    """``settings`` are those of ``RunConfig``, in plain data; ``error`` is why there are none."""

    rows: tuple[Row, ...]
    settings: Mapping[str, object]
    warnings: tuple[str, ...] = ()
    error: str | None = None


def convert(path: str | Path, ranks: int | None = None) -> ConvertedConfig:
    """Read an Accelerate YAML or a DeepSpeed JSON; ``ranks`` is the number of processes, where the file needs it.

    Raises:
        ConfigError: the file cannot be read as either.
    """
    file = _accelerate_file(path)
    rows = tuple(_accelerate_rows(file) if file else walk(deepspeed_keys.KEYS, read_json(path)))
    try:
        if file is None:
            described = from_deepspeed(path)
            return ConvertedConfig(rows, _settings(described.settings, {}, ranks), described.warnings)
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
        return ConvertedConfig(rows, given | _settings(asked, given, ranks), warnings)
    except ConfigError as error:
        return ConvertedConfig(rows, {}, error=str(error))


def _accelerate_file(path: str | Path) -> YamlFile | None:
    """The file as YAML, or None when it is a DeepSpeed JSON."""
    if Path(path).suffix.lower() != ".json":
        return read_yaml(path)
    data = read_json(path)
    return YamlFile(str(path), data) if any(key in data for key in ONLY_IN_ACCELERATE) else None


def _accelerate_rows(file: YamlFile) -> Iterator[Row]:
    for key, value in file.data.items():
        rule = OTHER_KEYS.get(key)
        if key in SECTION_TABLES and isinstance(value, dict):
            section = {name: item for name, item in value.items() if name != FILE_KEY}
            yield from walk(SECTION_TABLES[key], section, key + ".")
            if isinstance(value.get(FILE_KEY), str) and value[FILE_KEY] != "none":
                yield from walk(deepspeed_keys.KEYS, read_json(value[FILE_KEY]))
        elif key in IN_FILES:
            outcome = Outcome.OFF if value is None else Outcome.USED
            yield Row(key, value, outcome, "asks for nothing" if value is None else key)
        elif key in ONLY_IN_ACCELERATE:
            yield Row(key, value, Outcome.USED, "checked")
        elif is_off(value) or value == DEFAULTS.get(key):
            yield Row(key, value, Outcome.OFF, "asks for nothing")
        elif isinstance(rule, Ignored):
            yield Row(key, value, Outcome.NO_EFFECT, rule.why)
        else:
            text = (
                f"asks for {rule.what}, which is not available. {rule.instead}"
                if rule
                else "this key is not known"
            )
            yield Row(key, value, Outcome.REFUSED, text)


def _settings(asked: Mapping[str, SettingValue], given: ValuesByName, ranks: int | None) -> dict[str, object]:
    """The settings of a file of ours that say the same.

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
    """The number of processes when the three batch sizes say it."""
    if batch.train is None or batch.micro is None or batch.accumulation is None:
        return None
    processes, rest = divmod(batch.train, batch.micro * batch.accumulation)
    return processes if processes and not rest else None
