"""Several models that take turns on one accelerator: each comes when it is called, and the one before it leaves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.comm.tree import send_to_device
from lockstep.runtime.memory import clear_device_cache


class UserCpuOffloadHook:
    """Lets a model leave the device that it came to when it was called."""

    def __init__(self, model: nn.Module, device: torch.device, previous: UserCpuOffloadHook | None) -> None:
        self.model = model
        self._device = device
        self._previous = previous
        self._handle = model.register_forward_pre_hook(self._come, prepend=True, with_kwargs=True)

    def offload(self) -> None:
        """Bring the model to the CPU."""
        self.model.to("cpu")
        if self._device.type != "cpu":
            clear_device_cache()

    def remove(self) -> None:
        """Leave the model where it is from now on."""
        self._handle.remove()

    @torch.compiler.disable
    def _come(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self._previous is not None and self._previous.model is not self.model:
            self._previous.offload()
        self.model.to(self._device)
        return send_to_device(args, self._device), send_to_device(kwargs, self._device)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: torch.device | str | int | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Bring a model to the CPU now, and as a whole to ``execution_device`` when it is called, where it stays.

    Args:
        model: Changed in place.
        execution_device: Else the accelerator of this process, or the CPU.
        prev_module_hook: What this function returned for the model that is used before: it leaves the device
            when this one is called.

    Returns:
        The model, and a hook with ``offload()`` (to the CPU) and ``remove()``.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if execution_device is not None:
        device = torch.device(execution_device)
    elif accelerator is not None:
        device = accelerator if accelerator.type == "mps" else torch.device(accelerator.type, 0)
    else:
        device = torch.device("cpu")
    model.to("cpu")
    return model, UserCpuOffloadHook(model, device, prev_module_hook)
