"""Inputs of a module go to the device that it computes on, outputs of the model back to where its inputs were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lockstep.comm.tree import leaves, send_to_device


def cross_devices(
    model: nn.Module,
    devices: Mapping[str, torch.device],
    main_device: torch.device,
    skip_keys: str | Iterable[str] | None = None,
) -> list[RemovableHandle]:
    """Attach the hooks.

    Args:
        devices: Name of a module -> where it computes.
        main_device: Where the model's own inputs go.
        skip_keys: Names of keyword arguments, and of entries of outputs, that stay where they are.
    """
    crossing = _Model(main_device, skip_keys)
    handles = [
        model.register_forward_hook(crossing.after, with_kwargs=True, always_call=True),
    ]
    for name, device in devices.items():
        if name:
            module = model.get_submodule(name)
            handles.append(
                module.register_forward_pre_hook(_Inputs(device, skip_keys), prepend=True, with_kwargs=True)
            )
    handles.append(model.register_forward_pre_hook(crossing.before, prepend=True, with_kwargs=True))
    return handles


class _Inputs:
    """Moves the inputs of one module."""

    def __init__(self, device: torch.device, skip_keys: str | Iterable[str] | None) -> None:
        self._device = device
        self._skip_keys = skip_keys if isinstance(skip_keys, str) else list(skip_keys or ())

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self.moved(args, kwargs)

    def moved(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return send_to_device(args, self._device), send_to_device(
            kwargs, self._device, skip_keys=self._skip_keys
        )


class _Model:
    """Moves the inputs and outputs of the model."""

    def __init__(self, device: torch.device, skip_keys: str | Iterable[str] | None) -> None:
        self._inputs = _Inputs(device, skip_keys)
        self._skip_keys = skip_keys if isinstance(skip_keys, str) else list(skip_keys or ())
        self._from: list[torch.device | None] = []  # one for each call that is under way

    @torch.compiler.disable
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        tensors = (leaf for leaf in leaves((args, kwargs)).values() if isinstance(leaf, torch.Tensor))
        self._from.append(next((tensor.device for tensor in tensors), None))
        return self._inputs.moved(args, kwargs)

    @torch.compiler.disable
    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        device = self._from.pop() if self._from else None
        if device is None or output is None:
            return output
        return send_to_device(output, device, skip_keys=self._skip_keys)
