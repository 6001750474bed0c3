"""A checked device map: where each tensor of a model is at rest, and where it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.config.values import join_names, repr_short, suggestion
from lockstep.errors import ConfigError
from lockstep.offload.device_map.ties import TensorRef, tensor_refs

DISK = "disk"
CPU = torch.device("cpu")


@dataclass
class TensorPlacement:
    """Where a tensor is at rest, and where it is used."""

    ref: TensorRef
    device: torch.device
    on_disk: bool
    execution: torch.device

    @property
    def is_offloaded(self) -> bool:
        """Whether its values have to be brought to where they are used."""
        return self.on_disk or self.device != self.execution

    @property
    def name(self) -> str:
        return self.ref.name


def check_device_map(model: nn.Module, device_map: Mapping[str, object]) -> None:
    """Check that a device map gives one device to every parameter and persistent buffer.

    Raises:
        ConfigError: a name is not in the model, a tensor gets no device or several, or a device is not here.
    """
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    refs = tensor_refs(model)
    tensors = {name for ref in refs for name in ref.names}
    unknown = [name for name in device_map if name not in modules and name not in tensors]
    if unknown:
        raise ConfigError(
            f"device_map names {_quoted_names(unknown)}, which {type(model).__name__} does not have."
            f"{suggestion(str(unknown[0]), modules | tensors)} Use names of its modules or tensors."
        )
    devices = {name: as_device(device, name) for name, device in device_map.items()}
    for name, device in devices.items():
        for outer in _outer_names(name)[1:]:
            if outer in devices and devices[outer] != device:
                raise ConfigError(
                    f"device_map places '{name}' twice: on {device}, and as a part of '{outer}' on {devices[outer]}. "
                    "Name the other parts of that instead of the whole."
                )
    missed = [
        name
        for ref in refs
        for name in ref.names
        if ref.is_persistent and not any(outer in devices for outer in _outer_names(name))
    ]
    if missed:
        raise ConfigError(
            f"device_map gives no device to {_quoted_names(missed)}. Add them, or the modules that they are in."
        )


def as_device(device: object, module: str) -> torch.device | str:
    """``"disk"``, or the device of this machine that an entry of a device map means.

    Raises:
        ConfigError: there is none.
    """
    if device == DISK:
        return DISK
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator is not None else 0
    try:
        if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
            raise TypeError
        if isinstance(device, int):
            found = torch.device(accelerator.type if accelerator is not None else "cuda", device)
        else:
            found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device_map places '{module}' on {repr_short(device)}, which is no device. Use one of {_devices(count)}."
        ) from error
    if found.type == "cpu":
        return CPU
    if accelerator is None or found.type != accelerator.type or (found.index or 0) >= count:
        raise ConfigError(
            f"device_map places '{module}' on {found}, which this machine does not have. Use one of {_devices(count)}."
        )
    return found if found.type == "mps" else torch.device(found.type, found.index or 0)


def main_device_of(device_map: Mapping[str, object], main_device: object = None) -> torch.device:
    """Where offloaded weights are used: as given, else the first accelerator of the map, else the CPU."""
    if main_device is not None:
        device = as_device(main_device, "main_device")
        if not isinstance(device, torch.device):
            raise ConfigError("main_device='disk' cannot compute. Use the CPU or an accelerator.")
        return device
    devices = (as_device(device, name) for name, device in device_map.items())
    return next((device for device in devices if isinstance(device, torch.device) and device != CPU), CPU)


def assign_placements(
    model: nn.Module,
    device_map: Mapping[str, object],
    main_device: torch.device,
    offload_buffers: bool = False,
) -> list[TensorPlacement]:
    """The placement of every tensor. The map is checked before.

    Buffers of offloaded modules are kept where they are used unless ``offload_buffers``; those that are not
    persistent always are, as no file has them.

    Raises:
        ConfigError: a tied parameter would be used on two devices.
    """
    devices = {name: as_device(device, name) for name, device in device_map.items()}
    return [_placement(ref, devices, main_device, offload_buffers) for ref in tensor_refs(model)]


def _placement(
    ref: TensorRef, devices: Mapping[str, torch.device | str], main: torch.device, offload_buffers: bool
) -> TensorPlacement:
    entries = {
        name: next((devices[outer] for outer in _outer_names(name) if outer in devices), main)
        for name in ref.names
    }
    used_on = {
        name: entry if isinstance(entry, torch.device) and entry != CPU else main
        for name, entry in entries.items()
    }
    if len(set(used_on.values())) > 1:
        where = ", ".join(f"'{name}' on {device}" for name, device in used_on.items())
        raise ConfigError(
            f"One tensor with several names is placed on several devices: {where}. Place all on one."
        )
    entry, execution = entries[ref.name], used_on[ref.name]
    stays = not ref.is_parameter and not (offload_buffers and ref.is_persistent)
    if stays:
        return TensorPlacement(ref, execution, False, execution)
    on_disk = entry == DISK
    return TensorPlacement(ref, CPU if on_disk else entry, on_disk, execution)  # type: ignore[arg-type]


def _outer_names(name: str) -> list[str]:
    """The name and those of the modules around it, the nearest first."""
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _devices(count: int) -> str:
    return ", ".join([*map(str, range(count)), "'cpu'", "'disk'"])


def _quoted_names(names: list[str], limit: int = 5) -> str:
    return join_names((f"'{name}'" for name in names), limit)
