"""Hooks around the forward of a module, under the names and arguments that scripts know from Accelerate.

A hook is at ``module._hf_hook``, and the forward that it surrounds at ``module._old_forward``; other libraries look
there.
``dispatch_model`` needs none of them: its weights are streamed (see ``weights``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.comm.tree import leaves, send_to_device
from lockstep.offload.device_map.ties import like
from lockstep.offload.dispatch.attach import detach, is_dispatched
from lockstep.runtime.memory import clear_device_cache
from lockstep.torch_internals import modules as torch_modules

Device = torch.device | str | int
TiedMap = dict[int, dict[torch.device, torch.Tensor]]

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
    """What is done around a module's forward. ``no_grad``: the forward runs without gradients."""

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is added; returns the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Called before the forward; returns its arguments."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after the forward; returns its output."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed; returns the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks, each step in their order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Surround the module's forward with a hook, in place; with ``append`` after the one that is there, else instead.

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


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook: ModelHook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    if hook.no_grad:
        with torch.no_grad():
            output = module._old_forward(*args, **kwargs)
    else:
        output = module._old_forward(*args, **kwargs)
    return module._hf_hook.post_forward(module, output)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Give the module the forward back that it had, and with ``recurse`` all modules below it.

    A model that a device map dispatched is streamed no more.
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


def _own_tensors(module: nn.Module, buffers: bool, below: bool) -> dict[str, torch.Tensor]:
    """Parameters, and with ``buffers`` also these, of the module or with ``below`` of all of it."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(recurse=below))
    return tensors | dict(module.named_buffers(recurse=below)) if buffers else tensors


def _put(module: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, key = name.rpartition(".")
    holder = module.get_submodule(path)
    parameters = torch_modules.parameters_of(holder)
    if key in parameters:
        parameters[key] = like(parameters[key], value)
    else:
        torch_modules.buffers_of(holder)[key] = value


def as_device(device: Device) -> torch.device:
    """A device, of which a number is an accelerator's."""
    if not isinstance(device, int):
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cuda" if accelerator is None else accelerator.type, device)


class AlignDevicesHook(ModelHook):
    """Has a module's inputs and weights on one device when it runs.

    Args:
        execution_device: Where it runs; None: inputs and weights stay where they are.
        offload: Its weights are there during the forward only. At rest they are in ``weights_map``, and the module
            has tensors on the meta device.
        io_same_device: Outputs go to the device of the first tensor among the inputs.
        weights_map: Name of a tensor -> its value; else the values that the module has, on the CPU.
        offload_buffers: Offload buffers as well as parameters.
        place_submodules: All of this holds for the modules below it too.
        skip_keys: Names of keyword arguments, and of entries of outputs, that stay on their device.
        tied_params_map: Address of a weight -> device -> its copy there, which tied weights share.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedMap | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        if self.execution_device is None and not self.offload:
            return module
        tensors = _own_tensors(module, True, self.place_submodules)
        if not self.offload:
            for name, tensor in tensors.items():
                self._bring(module, name, tensor)
            return module
        moving = _own_tensors(module, self.offload_buffers, self.place_submodules)
        self.original_devices = {name: tensor.device for name, tensor in moving.items()}
        if self.weights_map is None:
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor in moving.items()}
        for name, tensor in moving.items():
            _put(module, name, tensor.detach().to("meta"))
        if self.execution_device is not None:
            for name in tensors.keys() - moving.keys():
                self._bring(module, name, tensors[name])
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.io_same_device:
            found = (leaf for leaf in leaves((args, kwargs)).values() if isinstance(leaf, torch.Tensor))
            self.input_device = next((tensor.device for tensor in found), None)
        if self.offload:
            assert self.weights_map is not None
            for name in self.original_devices:
                self._bring(module, name, self.weights_map[name])
        if self.execution_device is None:
            return args, kwargs
        device = as_device(self.execution_device)
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self.offload:
            for name in self.original_devices:
                _put(module, name, _tensor(module, name).detach().to("meta"))
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for name, device in self.original_devices.items():
            if device.type != "meta" and self.weights_map is not None:
                _put(module, name, self.weights_map[name].to(device))
        self.original_devices = {}
        return module

    def _bring(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        """A tensor of the module on the device where it runs, in the type that it has there."""
        here = _tensor(module, name)
        device = value.device if self.execution_device is None else as_device(self.execution_device)
        if value is here and here.device == device:
            return
        known = None if self.tied_params_map is None else self.tied_params_map.get(value.data_ptr())
        if known is not None and device in known:
            _put(module, name, known[device])
            return
        moved = value.detach().to(device, here.dtype)
        if known is not None:
            known[device] = moved
        _put(module, name, moved)


def _tensor(module: nn.Module, name: str) -> torch.Tensor:
    path, _, key = name.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(path), key)
    return tensor


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Give every module with tensors, and without a hook, one that has its inputs and weights on a device."""
    if not hasattr(module, "_hf_hook") and module.state_dict():
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(
            child, execution_device, skip_keys, preload_module_classes, tied_params_map
        )


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Give every module that has tensors of its own an ``AlignDevicesHook``, which see for the arguments.

    ``weights_map`` has the names that tensors have in the whole model, in which this module is ``module_name``.
    Modules of ``preload_module_classes`` get one hook for all that is below them.
    """
    whole = offload and type(module).__name__ in (preload_module_classes or ())
    if whole or _own_tensors(module, True, below=False):
        prefix = f"{module_name}." if module_name else ""
        values = None
        if weights_map is not None:
            values = {
                name: weights_map[prefix + name]
                for name in _own_tensors(module, offload_buffers, below=whole)
                if prefix + name in weights_map
            }
        hook = AlignDevicesHook(
            execution_device,
            offload,
            weights_map=values,
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    if whole:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            f"{module_name}.{name}" if module_name else name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """``attach_align_device_hook`` with a device, and whether to offload, for each block by its name."""
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            attach_align_device_hook(
                module,
                execution_device,
                True,
                weights_map,
                offload_buffers,
                module_name,
                skip_keys,
                preload_module_classes,
                tied_params_map,
            )
        else:
            hook = AlignDevicesHook(
                execution_device,
                io_same_device=True,
                place_submodules=True,
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
            )
            add_hook_to_module(module, hook)
        return
    names: Any = execution_device if isinstance(execution_device, Mapping) else offload
    devices: Any = names if names is execution_device else dict.fromkeys(names, execution_device)
    offloads: Any = offload if isinstance(offload, Mapping) else dict.fromkeys(names, offload)
    is_root = module_name == ""
    if module_name in devices and module_name in offloads:
        device = devices[module_name]
        common: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
        if offloads[module_name]:
            attach_align_device_hook(
                module,
                device,
                True,
                weights_map,
                offload_buffers,
                module_name,
                preload_module_classes=preload_module_classes,
                **common,
            )
            if not hasattr(module, "_hf_hook"):
                add_hook_to_module(module, AlignDevicesHook(device, io_same_device=is_root, **common))
        else:
            hook = AlignDevicesHook(
                device,
                io_same_device=is_root,
                offload_buffers=offload_buffers,
                place_submodules=True,
                **common,
            )
            add_hook_to_module(module, hook)
        attach_execution_device_hook(module, device, preload_module_classes=preload_module_classes, **common)
    elif is_root:
        hook = AlignDevicesHook(
            devices.get(""), io_same_device=True, skip_keys=skip_keys, tied_params_map=tied_params_map
        )
        add_hook_to_module(module, hook)
    for name, child in module.named_children():
        attach_align_device_hook_on_blocks(
            child,
            devices,
            offloads,
            weights_map,
            offload_buffers,
            f"{module_name}.{name}" if module_name else name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


class CpuOffload(ModelHook):
    """A module rests on the CPU, goes to ``execution_device`` when it is called, and stays there.

    ``prev_module_hook``: of the module that is called before it, and leaves the device then.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = default_device() if execution_device is None else as_device(execution_device)

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    @torch.compiler.disable
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
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
    """Lets a model leave the device that it came to when it was called."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Bring the model to the CPU."""
        self.hook.init_hook(self.model)
        clear_device_cache()

    def remove(self) -> None:
        """Leave the model where it is from now on."""
        remove_hook_from_module(self.model)


class LayerwiseCastingHook(ModelHook):
    """A module's weights rest in ``storage_dtype`` and have ``compute_dtype`` during its forward."""

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
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
    """Store the weights of linear and convolution layers in another type than they compute in; for inference.

    Modules whose names match a pattern (a regular expression), or of a class to skip, stay with all below them.
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
