"""Single tensors of a module: their names, sizes and memory, and another tensor in the place of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from lockstep.offload.device_map.memory import (
    dtype_of,
)
from lockstep.offload.device_map.placement import like
from lockstep.offload.dispatch.module_hooks import Device
from lockstep.torch_internals import modules as torch_modules
from lockstep.utils.dataclasses import CustomDtype


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Return the bytes that one number of a dtype takes in a file.

    Args:
        dtype: A ``torch.dtype``, or a ``CustomDtype``: ``INT4`` takes 1/2 byte and ``INT2`` 1/4. ``torch.bool``
            counts as 1/8, as in Accelerate, although a truth value takes a byte of memory.

    Raises:
        ValueError: ``dtype`` is something else.

    Examples:
        ```python
        import torch
        from lockstep.utils import dtype_byte_size

        assert dtype_byte_size(torch.bfloat16) == 2
        ```
    """
    if dtype == torch.bool:
        return 1 / 8
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    return {CustomDtype.FP8: 1.0, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}[CustomDtype(dtype)]


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers that a state dict leaves out.

    Args:
        module: The module.
        recurse: Look in all modules below it, too.
        fqns: Return names from ``module`` on, such as ``"encoder.mask"``, and not only their last part.

    Examples:
        ```python
        import torch
        from lockstep.utils import get_non_persistent_buffers

        layer = torch.nn.Linear(4, 1)
        layer.register_buffer("mask", torch.ones(4), persistent=False)
        assert get_non_persistent_buffers(layer) == {"mask"}
        ```
    """
    found = set()
    for path, part in module.named_modules() if recurse else [("", module)]:
        for name in torch_modules.buffers_of(part):
            if not torch_modules.is_persistent(part, name):
                found.add(f"{path}.{name}" if fqns and path else name)
    return found


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield pairs (name, tensor) of the parameters of a module, and then of its buffers.

    Args:
        module: The module.
        include_buffers: Whether buffers are yielded.
        recurse: Whether tensors of the modules below it are yielded.
        remove_non_persistent: Leave out buffers that a state dict leaves out.

    Examples:
        ```python
        import torch
        from lockstep.utils import named_module_tensors

        names = [name for name, _ in named_module_tensors(torch.nn.BatchNorm1d(4))]
        assert names[:3] == ["weight", "bias", "running_mean"]
        ```
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
        yield from (item for item in module.named_buffers(recurse=recurse) if item[0] not in left_out)


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: dict[int, dict[torch.device, torch.Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put one parameter or buffer on a device, and change its value or dtype if asked for.

    Args:
        module: The module that has the tensor, itself or in a module below it.
        tensor_name: The name of the tensor, from ``module`` on.
        device: The device. A number is the index of an accelerator.
        value: A new value, of the tensor's shape. A tensor on the meta device needs one, unless it stays there.
        dtype: The new dtype, for floating-point values. None: that of the tensor.
        fp16_statistics: Refused: scales of 8-bit weights of bitsandbytes, of any shape.
        tied_params_map: Address of a value -> device -> the tensor of any shape that is there already, for tied
            weights.
        non_blocking: Copy asynchronously, from pinned memory.
        clear_cache: Accepted, without effect.

    Raises:
        AttributeError: ``module`` has no module of this name.
        ValueError: there is no such tensor, it has no value, or ``value`` has another shape.

    Examples:
        ```python
        import torch
        from lockstep import init_empty_weights
        from lockstep.utils import set_module_tensor_to_device

        with init_empty_weights():
            layer = torch.nn.Linear(4, 1, bias=False)
        set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(1, 4))
        assert layer(torch.ones(1, 4)).item() == 4
        ```
    """
    path, _, key = tensor_name.rpartition(".")
    try:
        holder = module.get_submodule(path)
    except AttributeError as error:
        raise AttributeError(f"{type(module).__name__} has no module '{path}'. Check the name.") from error
    parameters, buffers = torch_modules.parameters_of(holder), torch_modules.buffers_of(holder)
    if key not in parameters and key not in buffers:
        raise ValueError(
            f"{type(holder).__name__} does not have a parameter or a buffer named {key}. Check the name."
        )
    if fp16_statistics is not None:
        raise ValueError(
            "fp16_statistics belongs to 8-bit weights of bitsandbytes. Leave it out for other weights."
        )
    registered = parameters if key in parameters else buffers
    old = registered[key]
    target = torch.device(device) if not isinstance(device, int) else _indexed(device)
    if old is None and value is None:
        return
    if value is None and old.is_meta and target.type != "meta":
        raise ValueError(
            f"{tensor_name} is on the meta device, so it has no value to move to {target}. Pass its value."
        )
    if value is not None and old is not None and old.shape != value.shape:
        raise ValueError(
            f'Trying to set a tensor of shape {value.shape} in "{key}" (which has shape {old.shape}). '
            "Pass a value of that shape."
        )
    source = old.detach() if value is None else value.detach()
    wanted = _type_for(source, old, dtype if dtype is None else dtype_of(dtype), is_new=value is not None)
    known = None if tied_params_map is None else tied_params_map.get(source.data_ptr())
    if known is not None and target in known:
        registered[key] = known[target]
        return
    moved = source.to(target, wanted, non_blocking=non_blocking)
    if registered is parameters:
        if value is None and old is not None and moved.data_ptr() == old.data_ptr() and not old.is_meta:
            return
        registered[key] = like(old, moved) if old is not None else nn.Parameter(moved)
    else:
        registered[key] = moved
    if known is not None:
        known[target] = registered[key]


def _indexed(index: int) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cuda" if accelerator is None else accelerator.type, index)


def _type_for(
    source: torch.Tensor, old: torch.Tensor | None, dtype: torch.dtype | None, is_new: bool
) -> torch.dtype:
    """Return what a value becomes: integers and truth values stay as they are."""
    if not (source.is_floating_point() or source.is_complex()):
        return source.dtype
    if dtype is not None:
        return dtype
    return old.dtype if is_new and old is not None else source.dtype


def retie_parameters(model: nn.Module, tied_params: Iterable[Iterable[str]]) -> None:
    """Let all names of tied weights stand for one parameter again, in place.

    Args:
        model: The model.
        tied_params: Groups of names, from ``find_tied_parameters``. Each group gets the parameter that has values.

    Examples:
        ```python
        import torch
        from lockstep.utils import find_tied_parameters, retie_parameters

        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(10, 4), "head": torch.nn.Linear(4, 10)})
        retie_parameters(model, [["embed.weight", "head.weight"]])
        assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]
        ```
    """
    for names in map(list, tied_params):
        holders = [(model.get_submodule(path), key) for path, _, key in (n.rpartition(".") for n in names)]
        tensors = [getattr(module, key) for module, key in holders]
        kept = next((tensor for tensor in tensors if not tensor.is_meta), tensors[0])
        for module, key in holders:
            torch_modules.parameters_of(module)[key] = kept
