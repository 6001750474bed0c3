"""Hooks around the forward of a module, under the names and arguments that scripts know from Accelerate.

A hook is at ``module._hf_hook``, and the forward that it surrounds at ``module._old_forward``; other libraries look
there.
``dispatch_model`` needs none of them: its weights are streamed (see ``weights``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lockstep.comm.tree import send_to_device
from lockstep.offload.dispatch.attach import detach, is_dispatched
from lockstep.runtime.memory import clear_device_cache

Device = torch.device | str | int
CallArguments = tuple[tuple[object, ...], dict[str, object]]
"""The arguments of a forward."""

UPCAST_LAYERS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
"""Layers whose weights may be stored in another type than they compute in."""


class ModelHook:
    """The base class of hooks around a module's forward. Override the methods that you need.

    ``add_hook_to_module`` adds a hook. With the class attribute ``no_grad = True``, the forward runs without
    gradients.

    Examples:
        ```python
        import torch
        from lockstep.hooks import ModelHook, add_hook_to_module

        class Shown(ModelHook):
            def pre_forward(self, module, *args, **kwargs):
                print("in", args[0].shape)
                return args, kwargs

            def post_forward(self, module, output):
                print("out", output.shape)
                return output

        layer = add_hook_to_module(torch.nn.Linear(4, 1), Shown())
        layer(torch.randn(2, 4))
        ```
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Return ``module``, changed as the hook needs it. It is called when the hook is added.

        Examples:
            ```python
            import torch
            from lockstep.hooks import ModelHook, add_hook_to_module

            class Frozen(ModelHook):
                def init_hook(self, module):
                    return module.requires_grad_(False)

            assert not add_hook_to_module(torch.nn.Linear(4, 1), Frozen()).weight.requires_grad
            ```
        """
        return module

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> CallArguments:
        """Return the arguments of the forward. It is called before each forward.

        Args:
            module: The module.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Returns:
            A tuple of positional arguments and a mapping of keyword arguments.

        Examples:
            ```python
            import torch
            from lockstep.hooks import ModelHook, add_hook_to_module

            class Doubled(ModelHook):
                def pre_forward(self, module, *args, **kwargs):
                    return (2 * args[0],), kwargs

            layer = add_hook_to_module(torch.nn.Identity(), Doubled())
            assert layer(torch.ones(1)).item() == 2
            ```
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: object) -> object:
        """Return the output of the forward. It is called after each forward of ``module``, with its ``output``.

        Examples:
            ```python
            import torch
            from lockstep.hooks import ModelHook, add_hook_to_module

            class InFloat32(ModelHook):
                def post_forward(self, module, output):
                    return output.float()

            layer = add_hook_to_module(torch.nn.Identity(), InFloat32())
            assert layer(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.float32
            ```
        """
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Return ``module`` as it was without the hook. It is called when the hook is removed.

        Examples:
            ```python
            import torch
            from lockstep.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

            class Frozen(ModelHook):
                def detach_hook(self, module):
                    return module.requires_grad_(True)

            layer = add_hook_to_module(torch.nn.Linear(4, 1).requires_grad_(False), Frozen())
            assert remove_hook_from_module(layer).weight.requires_grad
            ```
        """
        return module


class SequentialHook(ModelHook):
    """Several hooks as one. Each method of ``hooks`` is called in their order.

    Examples:
        ```python
        import torch
        from lockstep.hooks import ModelHook, SequentialHook, add_hook_to_module

        class Doubled(ModelHook):
            def post_forward(self, module, output):
                return 2 * output

        layer = add_hook_to_module(torch.nn.Identity(), SequentialHook(Doubled(), Doubled()))
        assert layer(torch.ones(1)).item() == 4
        ```
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> CallArguments:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: object) -> object:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Let a hook surround the forward of a module, in place, and return the module.

    Args:
        module: The module.
        hook: The hook.
        append: Keep the hook that the module has, and call the new one after it. Otherwise the new one replaces it.

    Examples:
        ```python
        import torch
        from lockstep.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

        class Doubled(ModelHook):
            def post_forward(self, module, output):
                return output * 2

        layer = torch.nn.Identity()
        add_hook_to_module(layer, Doubled())
        assert layer(torch.ones(1)).item() == 2
        remove_hook_from_module(layer)
        assert layer(torch.ones(1)).item() == 1
        ```
    """
    there = getattr(module, "_hf_hook", None)
    if append and there is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(there, hook)
    around: Any = module
    if not hasattr(module, "_old_forward"):
        around._old_forward = module.forward
    module = hook.init_hook(module)
    around = module
    around._hf_hook = hook
    forward = functools.partial(_hooked_forward, module)
    around.forward = functools.update_wrapper(forward, around._old_forward)
    return module


def _hooked_forward(module: Any, *args: object, **kwargs: object) -> object:
    hook: ModelHook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    with torch.no_grad() if hook.no_grad else nullcontext():
        output = module._old_forward(*args, **kwargs)
    return module._hf_hook.post_forward(module, output)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook of a module, so that it has its own forward again, and return the module.

    Args:
        module: The module. If it was dispatched, its weights are no longer streamed.
        recurse: Remove the hooks of all modules below it, too.

    Examples:
        ```python
        import torch
        from lockstep.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

        layer = torch.nn.Linear(4, 1)
        forward = layer.forward
        add_hook_to_module(layer, ModelHook())
        remove_hook_from_module(layer)
        assert layer.forward == forward
        ```
    """
    if is_dispatched(module):
        detach(module)
    around: Any = module
    if hasattr(module, "_hf_hook"):
        around._hf_hook.detach_hook(module)
        del around._hf_hook
    if hasattr(module, "_old_forward"):
        forward = around._old_forward
        del around._old_forward
        if getattr(forward, "__func__", None) is type(module).forward:
            module.__dict__.pop("forward", None)
        else:
            around.forward = forward
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def as_device(device: Device) -> torch.device:
    """A device, of which a number is an accelerator's."""
    if not isinstance(device, int):
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cuda" if accelerator is None else accelerator.type, device)


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
    """The first accelerator, else the CPU."""
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


class LayerwiseCastingHook(ModelHook):
    """A hook that stores the weights of a module in one dtype, and casts them to another one for each forward.

    Args:
        storage_dtype: The dtype in which weights are stored, such as ``torch.float8_e4m3fn``.
        compute_dtype: The dtype that they have during the forward.
        non_blocking: Cast asynchronously.

    Examples:
        ```python
        import torch
        from lockstep.hooks import LayerwiseCastingHook, add_hook_to_module

        hook = LayerwiseCastingHook(torch.bfloat16, torch.float32, non_blocking=False)
        layer = add_hook_to_module(torch.nn.Linear(4, 1), hook)
        assert layer.weight.dtype == torch.bfloat16  # at rest
        ```
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> CallArguments:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: object) -> object:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers in one dtype, and compute in another one. Use it for
    inference.

    Args:
        module: The model, which is changed in place.
        storage_dtype: The dtype in which weights are stored, such as ``torch.float8_e4m3fn``.
        compute_dtype: The dtype that they have during the forward.
        skip_modules_pattern: Regular expressions. Modules whose name has a match stay as they are, with all below
            them.
        skip_modules_classes: Classes of modules that stay as they are, with all below them.
        non_blocking: Cast asynchronously.

    Examples:
        ```python
        import torch
        from lockstep.big_modeling import attach_layerwise_casting_hooks

        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        attach_layerwise_casting_hooks(model, storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
        assert model[0].weight.dtype == torch.bfloat16
        with torch.no_grad():
            assert model(torch.randn(2, 4)).dtype == torch.float32
        ```
    """
    patterns = (
        (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    )
    for name, part in _not_skipped(module, "", patterns, skip_modules_classes or ()):
        if isinstance(part, UPCAST_LAYERS):
            own = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(module.get_submodule(name), own, append=True)


def _not_skipped(
    module: nn.Module, name: str, patterns: tuple[str, ...], classes: tuple[type[nn.Module], ...]
) -> Iterable[tuple[str, nn.Module]]:
    """(name, module) of what is left when modules of these names and classes are taken out with all below them."""
    if isinstance(module, classes) or any(re.search(pattern, name) for pattern in patterns):
        return
    yield name, module
    for key, child in module.named_children():
        yield from _not_skipped(child, f"{name}.{key}" if name else key, patterns, classes)
