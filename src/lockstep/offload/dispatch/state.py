"""The weights of a model that is offloaded, in part or whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from lockstep.offload.device_map.ties import like
from lockstep.offload.dispatch.attach import OFFLOADED
from lockstep.offload.dispatch.loading import Path
from lockstep.offload.dispatch.module_hooks import AlignDevicesHook
from lockstep.offload.files.offload_folder import TensorToWrite, write_to_folder
from lockstep.offload.files.stored import pieces_on_cpu
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals import tensors as torch_tensors


def offload_state_dict(save_dir: Path, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write tensors, of any shape, to an offload folder, from which ``dispatch_model`` and ``disk_offload`` take them.

    Raises:
        OffloadError: the folder is full, cannot be written, or holds other values under one of the names.
    """
    write_to_folder(
        os.fspath(save_dir),
        [
            TensorToWrite(name, tensor.dtype, tensor.shape, partial(pieces_on_cpu, tensor))
            for name, tensor in state_dict.items()
        ],
    )


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of a model with all its tensors on the CPU; those of the disk stay there, mapped."""
    return {
        name: value.detach().to("cpu") if isinstance(value, torch.Tensor) else value
        for name, value in model.state_dict().items()
    }


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether parameters of the module itself are brought from elsewhere when it is used."""
    hook = module.__dict__.get("_hf_hook")
    return OFFLOADED in module.__dict__ or (isinstance(hook, AlignDevicesHook) and hook.offload)


@contextmanager
def align_module_device(
    module: nn.Module, execution_device: torch.device | str | int | None = None
) -> Iterator[None]:
    """Inside, the module's own parameters are on ``execution_device``; without one they are where they are at rest.

    What is written to them inside is kept.
    """
    if execution_device is None:
        yield
        return
    device = torch.device(execution_device)
    moved = {}
    for key, parameter in torch_modules.parameters_of(module).items():
        if parameter is not None and parameter.device != device:
            there = like(parameter, parameter.detach().to(device))
            moved[key] = (parameter, there, torch_tensors.version(there))
    try:
        for key, (_, there, _) in moved.items():
            torch_modules.parameters_of(module)[key] = there
        yield
    finally:
        for key, (parameter, there, version) in moved.items():
            torch_modules.parameters_of(module)[key] = parameter
            if torch_tensors.version(there) != version:
                with torch.no_grad():
                    parameter.copy_(there)
