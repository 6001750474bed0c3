"""Names that scripts import from ``accelerate.utils.deepspeed``. Sharding runs on torch's engine, not on DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.compat.deepspeed.optimizers import DummyOptim, DummyScheduler
from lockstep.config.json_file import read_json
from lockstep.errors import ConfigError, UsageError

__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
    "get_active_deepspeed_plugin",
]


class HfDeepSpeedConfig:
    """A DeepSpeed configuration, from a path of a JSON file or a mapping, that is asked for keys such as ``a.b.c``.

    Raises:
        ValueError: it is neither.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        if isinstance(config_file_or_dict, Mapping):
            self.config: dict[str, Any] = _copied(config_file_or_dict)
        elif isinstance(config_file_or_dict, (str, Path)):
            self.config = dict(read_json(config_file_or_dict))
        else:
            raise ConfigError(
                f"A DeepSpeed configuration of type {type(config_file_or_dict).__name__} was given. Pass the path of a "
                "JSON file, or a mapping."
            )
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Read the stage, and whether something is offloaded, again."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = {
            self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")
        }
        self._offload = bool(devices & {"cpu", "nvme"})
        self._dtype = next(
            (dtype for key, dtype in _TYPES.items() if self.is_true(f"{key}.enabled")), torch.float32
        )

    def dtype(self) -> torch.dtype:
        """The type in which weights are computed with."""
        return self._dtype

    def find_config_node(self, ds_key_long: str) -> tuple[Any, str]:
        """(the section that holds a key, or None, the last part of the key)."""
        *path, key = ds_key_long.split(".")
        section: Any = self.config
        for part in path:
            section = section.get(part) if isinstance(section, Mapping) else None
            if section is None:
                return None, key
        return section, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        section, key = self.find_config_node(ds_key_long)
        return default if section is None else section.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a key with all that is below it. Raises ValueError if it is not there and must be."""
        section, key = self.find_config_node(ds_key_long)
        if section is not None and key in section:
            del section[key]
        elif must_exist:
            raise ConfigError(f"{ds_key_long} is not in the configuration {self.config}. Check the name.")

    def is_true(self, ds_key_long: str) -> bool:
        value = self.get_value(ds_key_long)
        return value is not None and bool(value)

    def is_false(self, ds_key_long: str) -> bool:
        value = self.get_value(ds_key_long)
        return value is not None and not bool(value)

    def is_zero2(self) -> bool:
        return self._stage == 2

    def is_zero3(self) -> bool:
        return self._stage == 3

    def is_offload(self) -> bool:
        return self._offload


_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _copied(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in section.items()}


def get_active_deepspeed_plugin(state: Any) -> Any:
    """The DeepSpeed plugin of a run. Raises ValueError if there is none."""
    plugin = getattr(state, "deepspeed_plugin", None)
    if plugin is None:
        raise ValueError("This run has no DeepSpeed plugin. Pass deepspeed_plugin to Accelerator.")
    return plugin


class _OfDeepSpeedsEngine:
    """A class of which there are no instances here: ``isinstance`` says so, and making one is refused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError(
            f"{type(self).__name__} wraps a part of DeepSpeed's engine, which is not used here. Use what "
            "accelerator.prepare() returns."
        )


class DeepSpeedEngineWrapper(_OfDeepSpeedsEngine):
    """See ``Accelerator.backward``."""


class DeepSpeedOptimizerWrapper(_OfDeepSpeedsEngine):
    """See ``PreparedOptimizer``."""


class DeepSpeedSchedulerWrapper(_OfDeepSpeedsEngine):
    """See ``PreparedScheduler``."""
