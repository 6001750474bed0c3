"""A hook that keeps a whole model on the CPU until it is called: for several that are used one after the other."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.comm.tree import send_to_device
from lockstep.offload.dispatch.module_hooks import (
    CallArguments,
    Device,
    ModelHook,
    add_hook_to_module,
    as_device,
    remove_hook_from_module,
)
from lockstep.runtime.memory import clear_device_cache


class CpuOffload(ModelHook):
    """A hook that keeps a module on the CPU until it is called. Then the module goes to a device, and stays there.

    ``cpu_offload_with_hook`` adds one.

    Args:
        execution_device: The device. None: the first accelerator, or the CPU.
        prev_module_hook: The hook of a module that is used before this one. When this module is called, that one goes
            back to the CPU.

    Examples:
        ```python
        import torch
        from lockstep.hooks import CpuOffload, add_hook_to_module

        layer = add_hook_to_module(torch.nn.Linear(4, 1), CpuOffload("cpu"))  # or 0, the first GPU
        assert layer.weight.device == torch.device("cpu")
        ```
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = default_device() if execution_device is None else as_device(execution_device)

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    @torch.compiler.disable
    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> CallArguments:
        previous = self.prev_module_hook
        if previous is not None and previous.model is not module:
            previous.offload()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


def default_device() -> torch.device:
    """Return the first accelerator, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return accelerator if accelerator.type == "mps" else torch.device(accelerator.type, 0)


class UserCpuOffloadHook:
    """Brings a model back to the CPU. ``cpu_offload_with_hook`` returns it.

    Args:
        model: The model.
        hook: The hook that the model has.

    Examples:
        ```python
        import torch
        from lockstep import cpu_offload_with_hook

        model, hook = cpu_offload_with_hook(torch.nn.Linear(4, 1), "cpu")  # or 0, the first GPU
        model(torch.randn(2, 4))
        hook.offload()  # back to the CPU
        hook.remove()  # and there it stays
        ```
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Bring the model to the CPU."""
        self.hook.init_hook(self.model)
        clear_device_cache()

    def remove(self) -> None:
        """Remove the hook. The model stays where it is now."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: torch.device | str | int | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Bring a model to the CPU. When it is called, it goes to a device as a whole, and stays there.

    With several models that are used one after the other, only one is on the device at a time.

    Args:
        model: The model, which is changed in place.
        execution_device: The device. None: the first accelerator, or the CPU.
        prev_module_hook: The hook that this function returned for the model that is used before. That model goes back
            to the CPU when this one is called.

    Returns:
        The model, and a hook whose ``offload()`` brings the model to the CPU and whose ``remove()`` removes the hook.

    Examples:
        ```python
        import torch
        from lockstep import cpu_offload_with_hook

        encoder, first = cpu_offload_with_hook(torch.nn.Linear(4, 8), "cpu")  # or 0, the first GPU
        decoder, second = cpu_offload_with_hook(torch.nn.Linear(8, 1), "cpu", prev_module_hook=first)
        out = decoder(encoder(torch.randn(2, 4)))  # the encoder leaves before the decoder comes
        second.offload()
        assert out.shape == (2, 1)
        ```
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
