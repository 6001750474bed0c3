"""Device maps by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.placement.device_map import infer_auto_device_map
from lockstep.placement.memory import MaxMemory, get_balanced_memory

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def resolve_device_map(
    model: nn.Module,
    device_map: str | Mapping[str, object],
    max_memory: MaxMemory | None,
    no_split_module_classes: str | Iterable[str] | None,
    dtype: torch.dtype | str | None = None,
    offload_buffers: bool = False,
) -> dict[str, object]:
    """The device map that is meant: itself, or the one that a strategy's name stands for.

    Raises:
        ConfigError: there is no such strategy.
    """
    if not isinstance(device_map, str):
        return dict(device_map)
    if device_map not in STRATEGIES:
        raise ConfigError(
            f"device_map={device_map!r} is not one of {', '.join(STRATEGIES)}. Use one of them, or a mapping from "
            "modules to devices such as {'': 'cpu'}."
        )
    if device_map != "sequential":
        low_zero = device_map == "balanced_low_0"
        max_memory = get_balanced_memory(model, max_memory, no_split_module_classes, dtype, low_zero=low_zero)
    return dict(
        infer_auto_device_map(
            model, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
    )
