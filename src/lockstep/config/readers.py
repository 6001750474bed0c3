"""Readers of single values that foreign configurations have: ``(value, key) -> ours``; None: nothing said."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lockstep.config.values import (
    decimal_number,
    integer_between,
    parse_bool,
    refused,
    repr_short,
    suggestion,
)
from lockstep.errors import ConfigError

MAX_SCALE_POWER = 32


class Placeholder:
    """Stands for an object that a configuration describes, until ``prepare`` builds that one."""


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer by name: ``type`` such as ``AdamW``, ``params`` such as ``{"lr": 1e-3}``.

    With ``replaces`` it takes the place, and the parameters, of an optimizer that ``prepare`` is given.
    """

    type: str
    params: dict[str, object]
    replaces: bool = field(default=False, repr=False)


@dataclass(frozen=True)
class SchedulerConfig:
    """A learning rate schedule by name: ``type`` such as ``WarmupLR``, ``params`` its arguments."""

    type: str
    params: dict[str, object]


def number(value: object, key: str) -> float:
    """Return a finite number of at least 0."""
    result = decimal_number(value)
    if not 0 <= result < math.inf:
        raise refused(value, key, "a number of at least 0", "Set such a number.")
    return result


def positive(value: object, key: str) -> float | None:
    """Return a number; 0 is nothing said."""
    return number(value, key) or None


def switch(value: object, key: str) -> bool | None:
    """Return True, or None: nothing said."""
    return parse_bool(value, key) or None


def several(value: object, key: str) -> int | None:
    """Return a number of ranks; 0 and 1 are nothing said."""
    ranks = integer_between(0, 2**20)(value, key)
    return ranks if ranks > 1 else None


def ulysses(value: object, key: str) -> dict[str, object]:
    """Return a number of ranks that share each sequence by all-to-all; 0 and 1 are nothing said."""
    ranks = several(value, key)
    return {} if ranks is None else {"cp": ranks, "cp_method": "ulysses"}


def int8(value: object, key: str) -> str | None:
    """Quantised, or nothing said."""
    return "int8" if parse_bool(value, key) else None


def power_of_two(value: object, key: str) -> float:
    return 2.0 ** integer_between(0, MAX_SCALE_POWER)(value, key)


def word(known: Mapping[str, object]) -> Callable[[object, str], object]:
    """Return what a word stands for, in any case; numbers count as words."""

    def read(value: object, key: str) -> object:
        text = str(value).lower() if isinstance(value, (str, int)) else ""
        if text not in known:
            near = suggestion(text, known)
            raise ConfigError(
                f"{key}={repr_short(value)} is not one of {', '.join(known)}.{near or ' Use one of them.'}"
            )
        return known[text]

    return read


DTYPE_WORDS = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}


def dtype(value: object, key: str) -> str:
    """Read ``fp32``, ``fp16`` or ``bf16`` from any of their names, or from a torch.dtype."""
    text = str(value).lower()
    if text not in DTYPE_WORDS:
        raise refused(value, key, "one of fp32, fp16, bf16", "Use one of them.")
    return DTYPE_WORDS[text]


offload_device = word({"none": None, "cpu": "cpu", "nvme": "nvme"})
"""DeepSpeed's places for offloaded state; ``none`` says nothing."""


def offloaded_to_host(value: object, key: str) -> str | None:
    """Read DeepSpeed's older switches as a device."""
    return "cpu" if parse_bool(value, key) else None


def offload_all(value: object, key: str) -> str | None:
    """Read FSDP's switch: where parameters rest, gradients and optimizer state do."""
    return "all" if parse_bool(value, key) else None


def folder(value: object, key: str) -> str | None:
    """Return a path; an empty one and ``none`` are nothing said."""
    if value in ("", "none"):
        return None
    if not isinstance(value, (str, os.PathLike)) or "\0" in str(value):
        raise refused(value, key, "a path", "Give the name of a folder.")
    return str(value)


def names(value: object, key: str) -> tuple[str, ...] | None:
    """Parse names from a list or joined by commas."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple, set, frozenset)) or not all(
        isinstance(part, str) for part in parts
    ):
        raise refused(value, key, "a list of names", "Write them as 'Block,Layer'.")
    found = tuple(part.strip() for part in parts if part.strip())
    return (tuple(sorted(found)) if isinstance(parts, (set, frozenset)) else found) or None


def optimizer(value: object, key: str) -> OptimizerConfig | None:
    described = _described(value, key, ("legacy_fusion",))
    return OptimizerConfig(*described) if described else None


def scheduler(value: object, key: str) -> SchedulerConfig | None:
    described = _described(value, key)
    return SchedulerConfig(*described) if described else None


SCALER_FIELDS: dict[str, Callable[[object, str], float]] = {
    "init_scale": number,
    "growth_factor": number,
    "backoff_factor": number,
    "growth_interval": integer_between(1, 2**31 - 1),
}


def grad_scaler(value: object, key: str) -> dict[str, float] | None:
    """Fields of ``GradScalerKwargs``."""
    if not isinstance(value, Mapping):
        raise refused(value, key, "a section", "Write keys such as init_scale: 65536.")
    for name in value:
        if name not in SCALER_FIELDS:
            near = suggestion(str(name), SCALER_FIELDS) or f" Known keys: {', '.join(SCALER_FIELDS)}."
            raise ConfigError(f"{key or 'it'} has no key {repr_short(name)}.{near}")
    return {name: SCALER_FIELDS[name](item, _inner(key, name)) for name, item in value.items()} or None


def _inner(key: str, name: str) -> str:
    """Return how a message calls a key of the section ``key``, or of the one that is named already."""
    return f"{key}.{name}" if key else name


def _described(value: object, key: str, off: tuple[str, ...] = ()) -> tuple[str, dict[str, object]] | None:
    """Type and parameters of an object that a file describes."""
    if not isinstance(value, Mapping):
        raise refused(value, key, "a section", "Write its type and params.")
    for name, item in value.items():
        if name not in ("type", "params") and (name not in off or item):
            near = suggestion(str(name), ("type", "params")) or " It may have type and params."
            raise ConfigError(
                f"{key or 'it'} has the key {repr_short(name)}, which is not known or not available.{near}"
            )
    kind, params = value.get("type"), value.get("params")
    if kind is None and not params:
        return None
    if not isinstance(kind, str) or not kind:
        raise refused(kind, _inner(key, "type"), "a name", "Write one such as AdamW or WarmupLR.")
    if params is None:
        params = {}
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise refused(
            params, _inner(key, "params"), "a section of named values", "Write lines such as lr: 0.001."
        )
    return kind, dict(params)
