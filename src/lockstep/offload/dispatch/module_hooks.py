"""Hooks around the forward of a module, under the names and arguments that scripts know from Accelerate.

A hook is at ``module._hf_hook``, and the forward that it surrounds at ``module._old_forward``; other libraries look
there. Hooks that are ready to use are in ``align_hooks`` and ``cpu_hooks``.
``dispatch_model`` needs none of them: its weights are streamed (see ``weights``).
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lockstep.offload.dispatch.attach import detach, is_dispatched

Device = torch.device | str | int
CallArguments = tuple[tuple[object, ...], dict[str, object]]
"""The arguments of a forward."""


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
        # The old hook is initialised again below, as a part of the new one.
        remove_hook_from_module(module)
        hook = SequentialHook(there, hook)
    around: Any = module
    # Where one hook replaces another, this stays the module's own forward.
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
        # Python finds a method of the class again without an entry of the instance.
        if getattr(forward, "__func__", None) is type(module).forward:
            module.__dict__.pop("forward", None)
        else:
            around.forward = forward
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def as_device(device: Device) -> torch.device:
    """Return a device, of which a number is an accelerator's."""
    if not isinstance(device, int):
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cuda" if accelerator is None else accelerator.type, device)
