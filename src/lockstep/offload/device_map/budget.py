"""How many bytes of weights may be in the main device's memory at once."""

from __future__ import annotations

import psutil
import torch

from lockstep.config.sizes import bytes_of
from lockstep.errors import ConfigError, OffloadError
from lockstep.offload.device_map.memory import DeviceName, MaxMemory, get_max_memory
from lockstep.offload.device_map.placement import TensorPlacement


def budget_of(
    memory_budget: int | str | None, max_memory: MaxMemory | None, main: torch.device, chosen_here: bool
) -> int | None:
    """The budget as asked for, else the main device's share of ``max_memory``; None: what a few blocks take.

    ``chosen_here``: the device map was made for what is free, which on a CPU is then the budget.

    Raises:
        ConfigError: it is no size.
    """
    if memory_budget is not None:
        budget = bytes_of(memory_budget, "memory_budget")
        if not budget:
            raise ConfigError(
                "memory_budget=0 leaves no memory for weights. Pass at least the size of one block."
            )
        return budget
    if max_memory is not None:
        return get_max_memory(max_memory).get(_key(main))
    return psutil.virtual_memory().available if chosen_here and main.type == "cpu" else None


def for_streaming(
    budget: int | None, placements: list[TensorPlacement], streamed: list[TensorPlacement], main: torch.device
) -> int | None:
    """What a budget leaves for streamed weights beside those that stay on the main device.

    Raises:
        OffloadError: it leaves nothing.
    """
    if budget is None:
        return None
    moving = {id(placement) for placement in streamed}
    staying = sum(
        placement.ref.tensor.nbytes
        for placement in placements
        if id(placement) not in moving and placement.device == main and not placement.on_disk
    )
    if staying > budget or (streamed and staying == budget):
        raise OffloadError(
            f"The budget of {budget} bytes on {main} is less than the {staying} bytes of weights that stay there. "
            "Raise it, or place more on the disk."
        )
    return budget - staying


def _key(device: torch.device) -> DeviceName:
    return device.type if device.type in ("cpu", "mps") else device.index or 0
