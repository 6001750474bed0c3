"""A DeepSpeed configuration that is asked for keys such as ``a.b.c``. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.files import JsonObject, read_json
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    import torch


class HfDeepSpeedConfig:
    """A DeepSpeed configuration that is asked for keys such as ``zero_optimization.stage``.

    It has the interface of DeepSpeed's and transformers' class of this name. ``config`` is the configuration as a
    mapping.

    Args:
        config_file_or_dict: The path of a JSON file, or a mapping, which is copied.

    Raises:
        ValueError: it is neither, or the file cannot be read.

    Examples:
        ```python
        import torch
        from lockstep.utils import HfDeepSpeedConfig

        offload = {"device": "cpu"}
        config = HfDeepSpeedConfig(
            {"zero_optimization": {"stage": 3, "offload_param": offload}, "bf16": {"enabled": True}}
        )
        assert config.is_zero3() and not config.is_zero2() and config.is_offload()
        assert config.dtype() == torch.bfloat16
        assert config.is_true("bf16.enabled") and not config.is_false("bf16.enabled")
        assert config.get_value("zero_optimization.stage") == 3
        assert config.find_config_node("zero_optimization.stage")[1] == "stage"
        config.del_config_sub_tree("zero_optimization.offload_param")
        config.set_stage_and_offload()  # after a change
        assert not config.is_offload()
        ```
    """

    def __init__(self, config_file_or_dict: object) -> None:
        if isinstance(config_file_or_dict, Mapping):
            self.config: JsonObject = _copied(config_file_or_dict)
        elif isinstance(config_file_or_dict, (str, Path)):
            self.config = dict(read_json(config_file_or_dict))
        else:
            raise ConfigError(
                f"A DeepSpeed configuration of type {type(config_file_or_dict).__name__} was given. Pass the path of a "
                "JSON file, or a mapping."
            )
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Read the stage, the offloading and the types again, after ``config`` was changed."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = {
            self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")
        }
        self._offload = bool(devices & {"cpu", "nvme"})
        types = [name for key, name in _TYPES.items() if self.is_true(f"{key}.enabled")]
        self._dtype = types[0] if types else "float32"

    def dtype(self) -> torch.dtype:
        """Return the ``torch.dtype`` that the configuration computes with: float16, bfloat16 or float32."""
        import torch

        found: torch.dtype = getattr(torch, self._dtype)
        return found

    def find_config_node(self, ds_key_long: str) -> tuple[Any, str]:
        """Return the section that has the key ``ds_key_long``, or None, and the last part of the key."""
        *path, key = ds_key_long.split(".")
        section: object = self.config
        for part in path:
            section = section.get(part) if isinstance(section, Mapping) else None
            if section is None:
                return None, key
        return section, key

    def get_value(self, ds_key_long: str, default: object = None) -> Any:
        """Return the value of the key ``ds_key_long``, or ``default`` if the configuration does not have it."""
        section, key = self.find_config_node(ds_key_long)
        return default if section is None else section.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a key with all that is below it.

        Args:
            ds_key_long: The key, such as ``zero_optimization.offload_param``.
            must_exist: Whether a key that does not exist is an error.

        Raises:
            ValueError: the key does not exist, and ``must_exist`` is True.
        """
        section, key = self.find_config_node(ds_key_long)
        if section is not None and key in section:
            del section[key]
        elif must_exist:
            raise ConfigError(f"{ds_key_long} is not in the configuration {self.config}. Check the name.")

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether the key ``ds_key_long`` exists and has a value such as True or 1."""
        value = self.get_value(ds_key_long)
        return value is not None and bool(value)

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether the key ``ds_key_long`` exists and has a value such as False or 0."""
        value = self.get_value(ds_key_long)
        return value is not None and not bool(value)

    def is_zero2(self) -> bool:
        """Return whether the configuration asks for stage 2 of ZeRO."""
        return self._stage == 2

    def is_zero3(self) -> bool:
        # transformers asks its own subclasses whether deepspeed.zero.Init splits models as they are made: never here.
        """Return whether the configuration asks for stage 3 of ZeRO.

        For transformers' own subclass it is False, so that transformers does not call ``deepspeed.zero.Init``.
        """
        return self._stage == 3 and not type(self).__module__.startswith("transformers.")

    def is_offload(self) -> bool:
        """Return whether parameters or optimizer state are offloaded to the CPU or to NVMe."""
        return self._offload


_TYPES = {"fp16": "float16", "bf16": "bfloat16"}


def _copied(section: Mapping[str, object]) -> dict[str, object]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in section.items()}
