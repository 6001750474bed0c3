"""A hook that has a module's inputs and weights on one device when it runs, and functions that give it to many modules.

``dispatch_model`` needs none of this: its weights are streamed (see ``weights``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import nn

from lockstep.comm.tree import leaves, send_to_device
from lockstep.offload.device_map.placement import like
from lockstep.offload.dispatch.module_hooks import (
    CallArguments,
    Device,
    ModelHook,
    add_hook_to_module,
    as_device,
)
from lockstep.torch_internals import modules as torch_modules

TiedMap = dict[int, dict[torch.device, torch.Tensor]]


class AlignDevicesHook(ModelHook):
    """A hook that has a module's inputs and weights on one device when the module runs.

    ``dispatch_model`` does not need it, because it streams weights in blocks.

    Args:
        execution_device: The device. None: inputs and weights stay where they are.
        offload: Bring weights to the device for the forward only. Between forwards, the module has tensors on the
            meta device, and ``weights_map`` has the values.
        io_same_device: Bring outputs to the device of the first tensor among the inputs.
        weights_map: Name of a tensor -> its value, of the same shape. None: the values that the module has, on the
            CPU.
        offload_buffers: Offload buffers as well as parameters.
        place_submodules: Do all of this for the modules below it, too.
        skip_keys: Names of keyword arguments and of entries of outputs that stay on their device.
        tied_params_map: Address of a weight of any shape -> device -> its copy there, which tied weights share.

    Examples:
        ```python
        import torch
        from lockstep.hooks import AlignDevicesHook, add_hook_to_module

        layer, x = torch.nn.Linear(4, 1), torch.randn(2, 4)
        before = layer(x)
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu", offload=True))  # or 0, the first GPU
        assert layer.weight.is_meta  # at rest
        assert torch.equal(layer(x), before)
        ```
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

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> CallArguments:
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

    def post_forward(self, module: nn.Module, output: object) -> object:
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
        """Bring a tensor of the module to the device where it runs, in the type that it has there."""
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
    execution_device: Device | None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Give each module that has tensors, but no hook yet, a hook that brings its inputs and weights to a device.

    Args:
        module: The model, which is changed in place.
        execution_device: The device. None: inputs and weights stay where they are.
        skip_keys: Names of keyword arguments and of entries of outputs that stay on their device.
        preload_module_classes: Names of classes of modules below which no hooks are added.
        tied_params_map: As in ``AlignDevicesHook``; weights have any shape.

    Examples:
        ```python
        import torch
        from lockstep.hooks import attach_execution_device_hook

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        attach_execution_device_hook(model, "cpu")  # or 0, the first GPU: inputs come there
        assert model(torch.randn(2, 4)).device == torch.device("cpu")
        ```
    """
    for _, part in _modules_to(module, "", set(preload_module_classes or ())):
        if not hasattr(part, "_hf_hook") and part.state_dict():
            hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
            add_hook_to_module(part, hook)


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
    """Give each module that has tensors of its own an ``AlignDevicesHook``.

    Args:
        module: The model or a part of it, which is changed in place.
        execution_device: As in ``AlignDevicesHook``.
        offload: As in ``AlignDevicesHook``.
        weights_map: Name of a tensor in the whole model -> its value, of the same shape.
        offload_buffers: As in ``AlignDevicesHook``.
        module_name: The name of ``module`` in the whole model.
        skip_keys: As in ``AlignDevicesHook``.
        preload_module_classes: Names of classes of modules that get one hook for all tensors below them.
        tied_params_map: As in ``AlignDevicesHook``; weights have any shape.

    Examples:
        ```python
        import torch
        from lockstep.hooks import attach_align_device_hook

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        attach_align_device_hook(model, execution_device="cpu", offload=True)
        assert model[1].weight.is_meta
        assert model(torch.randn(2, 4)).shape == (2, 1)
        ```
    """
    # Only offloaded weights come and go: others are there for whoever uses them.
    preloaded = set(preload_module_classes or ()) if offload else set()
    for name, part in _modules_to(module, module_name, preloaded):
        is_whole = type(part).__name__ in preloaded
        if not is_whole and not _own_tensors(part, True, below=False):
            continue
        prefix, values = f"{name}." if name else "", None
        if weights_map is not None:
            own = _own_tensors(part, offload_buffers, below=is_whole)
            values = {key: weights_map[prefix + key] for key in own if prefix + key in weights_map}
        hook = AlignDevicesHook(
            execution_device,
            offload,
            weights_map=values,
            offload_buffers=offload_buffers,
            place_submodules=is_whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(part, hook, append=True)


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
    """Give blocks of a model hooks that bring their inputs and weights to the devices of these blocks.

    Args:
        module: The model, which is changed in place.
        execution_device: Name of a block -> device, or one device for all blocks.
        offload: Name of a block -> whether its weights are offloaded, or one value for all blocks.
        weights_map: Name of a tensor in the whole model -> its value, of the same shape.
        offload_buffers: As in ``AlignDevicesHook``.
        module_name: The name of ``module`` in the whole model.
        skip_keys: As in ``AlignDevicesHook``.
        preload_module_classes: Names of classes of modules that get one hook for all tensors below them.
        tied_params_map: As in ``AlignDevicesHook``; weights have any shape.

    Examples:
        ```python
        import torch
        from lockstep.hooks import attach_align_device_hook_on_blocks

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        devices, offloaded = {"0": "cpu", "1": "cpu"}, {"0": True, "1": False}
        attach_align_device_hook_on_blocks(model, execution_device=devices, offload=offloaded)
        assert model[0].weight.is_meta and not model[1].weight.is_meta
        ```
    """

    hook_for = partial(AlignDevicesHook, skip_keys=skip_keys, tied_params_map=tied_params_map)

    def offload_below(part: nn.Module, name: str, device: Device | None) -> None:
        attach_align_device_hook(
            part,
            device,
            True,
            weights_map,
            offload_buffers,
            name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )

    if isinstance(execution_device, Mapping):
        devices: Mapping[str, Device | None] = execution_device
        offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    elif isinstance(offload, Mapping):
        devices, offloads = dict.fromkeys(offload, execution_device), offload
    else:
        if offload:
            offload_below(module, module_name, execution_device)
        else:
            hook = hook_for(execution_device, io_same_device=True, place_submodules=True)
            add_hook_to_module(module, hook)
        return
    for name, part in _modules_to(module, module_name, set()):
        is_root = name == ""
        if name in devices and name in offloads:
            device = devices[name]
            if not offloads[name]:
                hook = hook_for(
                    device, io_same_device=is_root, offload_buffers=offload_buffers, place_submodules=True
                )
                add_hook_to_module(part, hook)
            else:
                offload_below(part, name, device)
                # A block without tensors of its own has got no hook, but its inputs must come here too.
                if not hasattr(part, "_hf_hook"):
                    add_hook_to_module(part, hook_for(device, io_same_device=is_root))
            attach_execution_device_hook(part, device, skip_keys, preload_module_classes, tied_params_map)
        elif is_root:
            add_hook_to_module(part, hook_for(devices.get(""), io_same_device=True))


def _modules_to(module: nn.Module, name: str, last: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of it and of all below, but of none below modules of the classes ``last``."""
    yield name, module
    if type(module).__name__ not in last:
        for key, child in module.named_children():
            yield from _modules_to(child, f"{name}.{key}" if name else key, last)


def _own_tensors(module: nn.Module, buffers: bool, below: bool) -> dict[str, torch.Tensor]:
    """Return parameters, and with ``buffers`` also these, of the module or with ``below`` of all of it."""
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
