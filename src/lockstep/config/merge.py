"""Settings with their sources, so that two that contradict each other can be shown together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lockstep.config.parallel import Parallel
from lockstep.config.settings import IN_OTHER_FILES
from lockstep.config.values import SettingValue
from lockstep.errors import ConfigError

PLAIN = Parallel()
PARALLEL_FIELDS = tuple(item.name for item in fields(Parallel))


@dataclass(frozen=True)
class ExternalSettings:
    """What was asked for in the words of other libraries.

    ``plugin`` is the DeepSpeed plugin that is active first; ``plugins``: where there are several, each with its stage.
    """

    settings: Mapping[str, SettingValue]
    warnings: tuple[str, ...] = ()
    plugin: object = None
    plugins: Mapping[str, tuple[object, int]] = field(default_factory=dict)


def values_of_settings(settings: Mapping[str, tuple[Any, str]]) -> dict[str, SettingValue]:
    """Return what settings (name -> value, origin) say; None says nothing."""
    asked: dict[str, SettingValue] = {}
    for name, (value, origin) in settings.items():
        if value is None:
            continue
        source = (
            f"{name}={str(value)!r} ({origin})" if isinstance(value, str) else f"{name}={value} ({origin})"
        )
        if name == "parallel":
            asked |= values_of_parallel(Parallel.parse(value), source)
        elif name == "mixed_precision":
            # autocast computes in bf16 around layers of fp8, so that another source may say bf16 as well
            words = ("fp16", "bf16") if value != "fp8" else ("fp16", "fp8")
            asked |= {word: SettingValue(value == word, source) for word in words}
        elif name == "grad_scaler":
            asked |= {
                field: SettingValue(item, f"{name}.{field}={item} ({origin})")
                for field, item in value.items()
            }
        elif name in IN_OTHER_FILES:
            asked[name] = SettingValue(value, source)
    return asked


def values_of_parallel(parallel: Parallel, source: str) -> dict[str, SettingValue]:
    """Return the fields of a ``Parallel`` that differ from their defaults."""
    return {
        name: SettingValue(getattr(parallel, name), source)
        for name in PARALLEL_FIELDS
        if getattr(parallel, name) != getattr(Parallel, name)
    }


def parallel_sources(asked: Mapping[str, SettingValue]) -> dict[str, str]:
    """Return where each field of ``Parallel`` was said."""
    return {name: asked[name].source for name in PARALLEL_FIELDS if name in asked}


def joined_sources(sources: Mapping[str, str]) -> str:
    """Join several sources to one text, each once."""
    return "; ".join(dict.fromkeys(sources.values()))


def parallel_of(asked: Mapping[str, SettingValue]) -> Parallel:
    """Return the ``Parallel`` of the fields that were said.

    Raises:
        ConfigError: two of them contradict each other.
    """
    found = {name: asked[name].value for name in PARALLEL_FIELDS if name in asked}
    return Parallel(**found) if found else PLAIN


def precision_of(asked: Mapping[str, SettingValue]) -> str:
    """Return the precision: ``fp8``, ``fp16``, ``bf16`` or ``no``."""
    return next((word for word in ("fp8", "fp16", "bf16") if word in asked and asked[word].value), "no")


def merge_settings(*parts: Mapping[str, SettingValue]) -> dict[str, SettingValue]:
    """Return what several sources say together.

    Raises:
        ConfigError: two of them contradict each other; the message has both values.
    """
    together: dict[str, SettingValue] = {}
    for part in parts:
        for name, value in part.items():
            first = together.setdefault(name, value)
            if first.value != value.value:
                raise ConfigError(
                    f"{first.source} contradicts {value.source}. Give both the same value, or remove one of them."
                )
    return together
