"""Build a model without memory for its weights, or directly on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from lockstep.offload.device_map.placement import like


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Give new modules parameters with a shape and a dtype, but without values and memory, inside of the block.

    Their parameters are on the meta device. Fill them with ``load_checkpoint_and_dispatch``, or let ``prepare``
    initialise them.

    Args:
        include_buffers: Make buffers without values too. Some buffers are in no checkpoint, such as rotary
            frequencies and masks. They keep their values only without this.

    Examples:
        ```python
        import torch
        from lockstep import init_empty_weights

        with init_empty_weights():
            model = torch.nn.TransformerEncoderLayer(512, 8)  # no memory for 3 million weights
        assert all(parameter.is_meta for parameter in model.parameters())
        ```
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Put the parameters of new modules on a device inside of the block.

    A parameter that a module shares with an older one stays shared.

    Args:
        device: The device, such as ``"cuda"`` or ``"meta"``.
        include_buffers: Put buffers on the device, too.

    Examples:
        ```python
        import torch
        from lockstep import init_on_device

        with init_on_device("meta"):
            layer = torch.nn.Linear(1000, 1000)
        assert layer.weight.is_meta  # and takes no memory
        ```
    """
    target = torch.device(device)

    def moved_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or _is_on(parameter, target) or nn.parameter.is_lazy(parameter):
            return None
        return like(parameter, parameter.detach().to(target))  # type: ignore[return-value]

    def moved_buffer(module: nn.Module, name: str, buffer: torch.Tensor) -> torch.Tensor | None:
        return None if buffer is None or _is_on(buffer, target) else buffer.to(target)

    with ExitStack() as stack:
        stack.callback(register_module_parameter_registration_hook(moved_parameter).remove)  # type: ignore[arg-type]
        if include_buffers:
            stack.callback(register_module_buffer_registration_hook(moved_buffer).remove)  # type: ignore[arg-type]
            # What is computed for a buffer is made on the device at once.
            stack.enter_context(target)
        yield


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)
