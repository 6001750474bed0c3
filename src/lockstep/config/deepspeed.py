"""A DeepSpeed configuration in our settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.config.deepspeed_keys import KEYS
from lockstep.config.json_file import read_json
from lockstep.config.rules import Row, Said, Translation, translate
from lockstep.errors import ConfigError

NEVER = 2**31 - 1

OFFLOAD_TOGETHER = (
    "{source} offloads one part of the state; here shards of parameters, gradients and optimizer state move to "
    "host memory together."
)


def from_deepspeed(config: Any, where: str = "the DeepSpeed configuration") -> Translation:
    """Translate a path, a mapping, or an object with a mapping ``config``; ``where`` names a mapping in messages.

    What the file does not say stays unsaid, and so has the defaults of this package and of torch: a loss scale
    that grows every 2000 steps, and no clipping.

    Raises:
        ConfigError: a key is unknown or refused, or two of them contradict each other.
    """
    if isinstance(config, (str, Path)):
        where, config = str(config), read_json(config)
    config = getattr(config, "config", config)
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where} is of type {type(config).__name__}. Give a path or a mapping.")
    found = translate(KEYS, config, where)
    says, warnings = finish(found)
    return Translation(says, (*found.warnings, *warnings), found.rows)


def finish(found: Translation) -> tuple[dict[str, Said], list[str]]:
    """Settings that follow from several keys together, and warnings.

    Raises:
        ConfigError: they contradict each other.
    """
    says = dict(found.says)
    warnings = _offload(says, found.rows)
    _precision(says)
    _loss_scale(says)
    if "activation_offload" in says:
        says["activation"] = says.pop("activation_offload")._replace(value="offload")
    if "reduce" in says and not ("zero" in says and says["zero"].value):
        if says["reduce"].value != "fp32":
            raise ConfigError(
                f"{says['reduce'].source} needs ZeRO, which is off. Set zero_optimization.stage, or pass "
                "DistributedDataParallelKwargs(comm_hook=...)."
            )
        del says["reduce"]  # DistributedDataParallel averages in the type of the parameters
    return says, warnings


def _offload(says: Mapping[str, Said], rows: Iterable[Row]) -> list[str]:
    """The warning where only one part of the state was to be offloaded."""
    asked = [row.path for row in rows if "offload" in row.says]
    if len(asked) != 1 or "zero" not in says or not says["zero"].value:
        return []
    return [OFFLOAD_TOGETHER.format(source=says["offload"].source)]


def _precision(says: dict[str, Said]) -> None:
    """``torch_autocast`` to ``fp16`` or ``bf16``; both at once are refused."""
    dtype, autocast = says.pop("autocast_dtype", None), says.pop("autocast", None)
    if autocast is not None:
        name = dtype.value if dtype is not None else "bf16"
        if name == "fp32":
            raise ConfigError(
                f"{autocast.source} with dtype fp32 casts nothing. Set bf16 or fp16, or remove it."
            )
        if name in says and not says[name].value:
            del says[name]  # DeepSpeed wants its own engine off beside autocast
        says.setdefault(name, Said(True, autocast.source))
    fp16, bf16 = says.get("fp16"), says.get("bf16")
    if fp16 and bf16 and fp16.value and bf16.value:
        raise ConfigError(f"{fp16.source} contradicts {bf16.source}. Switch one of them off.")


def _loss_scale(says: dict[str, Said]) -> None:
    """A fixed loss scale is a dynamic one that never changes."""
    fixed = says.pop("loss_scale", None)
    if fixed is not None:
        says["init_scale"] = fixed
        says["growth_interval"] = Said(NEVER, fixed.source)
        says["backoff_factor"] = Said(math.nextafter(1.0, 0.0), fixed.source)  # torch wants less than 1
