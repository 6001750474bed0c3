"""A DeepSpeed configuration in our settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from lockstep.compat.deepspeed.keys import KEYS
from lockstep.compat.rules import Translation, translate
from lockstep.config.files import read_json
from lockstep.config.parallel_words import HOST, NOT_FOLDERS
from lockstep.config.values import SettingValue, repr_short, suggestion
from lockstep.errors import ConfigError

NEVER = 2**31 - 1


def from_deepspeed(config: object, where: str = "the DeepSpeed configuration") -> Translation:
    """Translate a path, a mapping, or an object with a mapping ``config``; ``where`` names a mapping in messages.

    What the file does not say stays unsaid, and so has the defaults of this package and of torch: a loss scale
    that grows every 2000 steps, and no clipping.

    Raises:
        ConfigError: a key of a section is unknown, a key is refused, or two of them contradict each other.
    """
    if isinstance(config, (str, Path)):
        where, config = str(config), read_json(config)
    config = getattr(config, "config", config)
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where} is of type {type(config).__name__}. Give a path or a mapping.")
    unknown = [str(key) for key in config if key not in KEYS]
    found = translate(KEYS, {key: value for key, value in config.items() if key in KEYS}, where)
    warnings = [
        f"{where}: {repr_short(key)[1:-1]} is not known, so it has no effect, as in DeepSpeed.{suggestion(key, KEYS)}"
        for key in unknown
    ]
    return Translation(finish(found), (*found.warnings, *warnings))


def finish(found: Translation) -> dict[str, SettingValue]:
    """Return settings that follow from several keys together.

    Raises:
        ConfigError: they contradict each other.
    """
    settings = dict(found.settings)
    _offload(settings)
    _precision(settings)
    _loss_scale(settings)
    if "activation_offload" in settings:
        settings["activation"] = settings.pop("activation_offload")._replace(value="offload")
    if "reduce" in settings and not ("zero" in settings and settings["zero"].value):
        if settings["reduce"].value != "fp32":
            raise ConfigError(
                f"{settings['reduce'].source} needs ZeRO, which is off. Set zero_optimization.stage, or pass "
                "DistributedDataParallelKwargs(comm_hook=...)."
            )
        # DistributedDataParallel averages in the type of the parameters.
        del settings["reduce"]
    return settings


def _offload(settings: dict[str, SettingValue]) -> None:
    """Devices and folders of the two parts to ``offload`` and ``offload_to``."""
    optimizer, param = (_offloaded(settings, part) for part in ("optimizer", "param"))
    if param is None or optimizer is None:
        if param is not None or optimizer is not None:
            word, (at, source) = (
                ("params", param) if param is not None else ("optimizer", optimizer or ("", ""))
            )
            _say_offload(settings, word, at, source)
    elif param[0] == optimizer[0]:
        _say_offload(settings, "all", param[0], f"{param[1]} and {optimizer[1]}")
    elif optimizer[0] == HOST:
        # With parameters in a folder, the rest is in host memory.
        _say_offload(settings, "params", *param)
    else:
        raise ConfigError(
            f"{optimizer[1]} and {param[1]} name two places, but everything that is offloaded goes to one place. "
            "Name the same folder in both, or offload the optimizer to cpu."
        )


def _offloaded(settings: dict[str, SettingValue], part: str) -> tuple[str, str] | None:
    """Return where a part is offloaded to, and what says so."""
    device, folder = settings.pop(f"{part}_device", None), settings.pop(f"{part}_folder", None)
    if device is None:
        return None
    if device.value == HOST:
        return HOST, device.source
    if folder is None:
        raise ConfigError(f"{device.source} has no folder. Set nvme_path in the same section.")
    if folder.value.lower() in NOT_FOLDERS:
        raise ConfigError(
            f"{folder.source} is not a folder. Name a folder on a disk, such as /scratch/offload."
        )
    return folder.value, f"{device.source} in {folder.value}"


def _say_offload(settings: dict[str, SettingValue], word: str, at: str, source: str) -> None:
    settings["offload"] = SettingValue(word, source)
    if at != HOST:
        settings["offload_to"] = SettingValue(at, source)


def _precision(settings: dict[str, SettingValue]) -> None:
    """Read ``torch_autocast`` as ``fp16`` or ``bf16``; both at once are refused."""
    dtype, autocast = settings.pop("autocast_dtype", None), settings.pop("autocast", None)
    if autocast is not None:
        name = dtype.value if dtype is not None else "bf16"
        if name == "fp32":
            raise ConfigError(
                f"{autocast.source} with dtype fp32 has no effect. Set bf16 or fp16, or remove it."
            )
        if name in settings and not settings[name].value:
            # DeepSpeed wants its own engine off beside autocast.
            del settings[name]
        settings.setdefault(name, SettingValue(True, autocast.source))
    fp16, bf16 = settings.get("fp16"), settings.get("bf16")
    if fp16 and bf16 and fp16.value and bf16.value:
        raise ConfigError(f"{fp16.source} contradicts {bf16.source}. Switch one of them off.")


def _loss_scale(settings: dict[str, SettingValue]) -> None:
    """Turn a fixed loss scale into a dynamic one that never changes."""
    fixed = settings.pop("loss_scale", None)
    if fixed is not None:
        settings["init_scale"] = fixed
        settings["growth_interval"] = SettingValue(NEVER, fixed.source)
        # Torch wants less than 1.
        settings["backoff_factor"] = SettingValue(math.nextafter(1.0, 0.0), fixed.source)
