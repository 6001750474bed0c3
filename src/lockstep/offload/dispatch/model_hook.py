"""Several models that take turns on one accelerator: each comes when it is called, and the one before it leaves."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.offload.dispatch.module_hooks import CpuOffload, UserCpuOffloadHook, add_hook_to_module


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
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
