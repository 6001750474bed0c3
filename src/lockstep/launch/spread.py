"""What settings and a DeepSpeed configuration say together of how a model is spread; whether it fits the processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.config import readers
from lockstep.config.merge import (
    joined_sources,
    merge_settings,
    parallel_of,
    parallel_sources,
    precision_of,
    values_of_settings,
)
from lockstep.config.settings import SETTINGS
from lockstep.config.values import SettingValue
from lockstep.config.world import BatchSizes, fitted


def check_spread(
    settings: Mapping[str, SettingValue], described: Mapping[str, SettingValue], sizes: Sequence[int]
) -> dict[str, SettingValue]:
    """Return whether ``parallel``, batch sizes and a DeepSpeed configuration agree, and fit each number of processes.

    Returns what they say together.

    Raises:
        ConfigError: they do not; the message has the values.
    """
    own = {name: (item.value, item.source) for name, item in settings.items()}
    for name, setting in SETTINGS.items():
        value, origin = own.get(name, (None, ""))
        if value is not None and setting.kind.is_section:
            own[name] = (setting.kind.for_worker(value, name), origin)
    words = settings["parallel"].words
    given = values_of_settings(own)
    given |= {
        name: SettingValue(given[name].value, source) for name, source in words.items() if name in given
    }
    asked = merge_settings(described, given)
    spread, batch = parallel_of(asked), BatchSizes.of(asked)
    for processes in sizes:
        fitted(spread, batch, processes)
    return asked


def described_settings(asked: Mapping[str, SettingValue], processes: int) -> dict[str, SettingValue]:
    """Return what a DeepSpeed configuration and the other settings add up to, each with where it is said."""
    found: dict[str, SettingValue] = {}
    words = parallel_sources(asked)
    if words:
        found["parallel"] = SettingValue(str(parallel_of(asked)), joined_sources(words), words)
    precision = precision_of(asked)
    setting = asked.get(precision) or asked.get("fp16") or asked.get("bf16")
    if setting is not None:
        found["mixed_precision"] = SettingValue(precision, setting.source)
    batch = BatchSizes.of(asked)
    solved = fitted(parallel_of(asked), batch, processes)
    follows = f"follows from {', '.join(batch.sources)} for {processes} processes"
    for name, value in (
        ("train_batch_size", solved.train),
        ("micro_batch_size", solved.micro),
        ("gradient_accumulation_steps", solved.accumulation),
    ):
        if value is not None:
            found[name] = SettingValue(value, asked[name].source if name in asked else follows)
    for name in ("gradient_clipping", "optimizer", "scheduler"):
        if name in asked:
            setting = asked[name]
            found[name] = SettingValue(SETTINGS[name].kind.plain_data(setting.value), setting.source)
    scaler = {name: asked[name] for name in readers.SCALER_FIELDS if name in asked}
    # With bf16 gradients are not scaled.
    if scaler and precision != "bf16":
        values = {name: item.value for name, item in scaler.items()}
        sources = {name: item.source for name, item in scaler.items()}
        found["grad_scaler"] = SettingValue(values, joined_sources(sources))
    return found
