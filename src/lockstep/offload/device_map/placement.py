"""A checked device map: where each tensor of a model is at rest, and where it is used. Tied tensors are one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from lockstep.config.values import join_names, repr_short, suggestion
from lockstep.errors import ConfigError, UsageError
from lockstep.torch_internals import modules as torch_modules


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter of ``model`` that has several names: one sorted list for each such
    parameter.

    Examples:
        ```python
        import torch
        from lockstep.utils import find_tied_parameters

        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(10, 4), "head": torch.nn.Linear(4, 10)})
        model["head"].weight = model["embed"].weight
        assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]
        ```
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


@dataclass
class TensorRef:
    """A parameter or buffer, all its names, and the modules that hold it."""

    tensor: torch.Tensor
    is_parameter: bool
    is_persistent: bool
    names: list[str] = field(default_factory=list)
    holders: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]

    def replace(self, data: torch.Tensor) -> None:
        """Let every holder have ``data`` instead; a parameter stays of its class, and keeps its attributes."""
        tensor = like(self.tensor, data) if self.is_parameter else data
        for module, key in self.holders:
            _registered(module, self.is_parameter)[key] = tensor
        self.tensor = tensor


def tensor_refs(model: nn.Module) -> list[TensorRef]:
    """Return every parameter and buffer of the model, once, parameters first.

    Raises:
        UsageError: a parameter has no shape yet (a lazy module).
    """
    refs: dict[int, TensorRef] = {}
    for is_parameter in (True, False):
        for module_name, module in model.named_modules(remove_duplicate=False):
            for key, tensor in _registered(module, is_parameter).items():
                if tensor is None:
                    continue
                name = f"{module_name}.{key}" if module_name else key
                if torch.nn.parameter.is_lazy(tensor):
                    raise UsageError(
                        f"{name} has no shape yet, because {type(module).__name__} is a lazy module. Run the "
                        "model once before it is placed."
                    )
                persistent = is_parameter or torch_modules.is_persistent(module, key)
                ref = refs.setdefault(id(tensor), TensorRef(tensor, is_parameter, persistent))
                ref.names.append(name)
                ref.is_persistent |= persistent
                if not any(holder is module and held == key for holder, held in ref.holders):
                    ref.holders.append((module, key))
    return list(refs.values())


def _registered(module: nn.Module, is_parameter: bool) -> torch_modules.Registered:
    return torch_modules.parameters_of(module) if is_parameter else torch_modules.buffers_of(module)


def like(parameter: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return a parameter of the same class, ``requires_grad`` and attributes around ``data``."""
    if not isinstance(parameter, nn.Parameter):
        return data
    kind = type(parameter)
    # torch refuses gradients of integers.
    requires_grad = parameter.requires_grad and (data.is_floating_point() or data.is_complex())
    new = kind(data, requires_grad=requires_grad)
    new.__dict__.update(parameter.__dict__)
    return new


@contextmanager
def undone_on_error(model: nn.Module, undo: Callable[[nn.Module], None]) -> Iterator[None]:
    """Give the model back the tensors that it has now if there is an error inside, after ``undo(model)``."""
    before = [
        (module, dict(torch_modules.parameters_of(module)), dict(torch_modules.buffers_of(module)))
        for module in model.modules()
    ]
    try:
        yield
    except BaseException:
        undo(model)
        for module, parameters, buffers in before:
            _registered(module, True).update(parameters)
            _registered(module, False).update(buffers)
        raise


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
    """Check that a device map gives one device to every parameter and every persistent buffer of a model.

    Args:
        model: The model.
        device_map: Name of a module or tensor -> index of an accelerator, a device, ``"cpu"`` or ``"disk"``.

    Raises:
        ConfigError: the model does not have a name, a tensor has no device or several, or this machine does not have
            a device.

    Examples:
        ```python
        import torch
        from lockstep.utils import check_device_map

        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        check_device_map(model, {"0": "cpu", "1": "disk"})
        try:
            check_device_map(model, {"0": "cpu"})
            raise AssertionError("the second layer has no device")
        except ValueError as error:
            assert "1." in str(error)
        ```
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
                    f"device_map places '{name}' twice: on {device}, and as a part of '{outer}' on "
                    f"{devices[outer]}. Name the other parts of '{outer}' instead of the whole."
                )
    missed = [
        name
        for ref in refs
        for name in ref.names
        if ref.is_persistent and not any(outer in devices for outer in _outer_names(name))
    ]
    if missed:
        raise ConfigError(
            f"device_map gives no device to {_quoted_names(missed)}. Add them, or the modules that contain them."
        )


def as_device(device: object, module: str) -> torch.device | str:
    """Return ``"disk"``, or the device of this machine that an entry of a device map means.

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
            f"device_map places '{module}' on {repr_short(device)}, which is no device. Use one of "
            f"{_devices(count)}."
        ) from error
    if found.type == "cpu":
        return CPU
    if accelerator is None or found.type != accelerator.type or (found.index or 0) >= count:
        raise ConfigError(
            f"device_map places '{module}' on {found}, which this machine does not have. Use one of {_devices(count)}."
        )
    return found if found.type == "mps" else torch.device(found.type, found.index or 0)


def main_device_of(device_map: Mapping[str, object], main_device: object = None) -> torch.device:
    """Return where offloaded weights are used: as given, else the first accelerator of the map, else the CPU."""
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
    """Return the placement of every tensor. The map is checked before.

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
    # A buffer that is not persistent needs no entry.
    entries = {
        name: next((devices[outer] for outer in _outer_names(name) if outer in devices), main)
        for name in ref.names
    }
    # What is at rest on an accelerator is used there, all else on the main device.
    used_on = {
        name: entry if isinstance(entry, torch.device) and entry != CPU else main
        for name, entry in entries.items()
    }
    if len(set(used_on.values())) > 1:
        where = ", ".join(f"'{name}' on {device}" for name, device in used_on.items())
        raise ConfigError(
            f"One tensor with several names is placed on several devices: {where}. Place all of them on one "
            "device."
        )
    entry, execution = entries[ref.name], used_on[ref.name]
    stays = not ref.is_parameter and not (offload_buffers and ref.is_persistent)
    if stays:
        return TensorPlacement(ref, execution, False, execution)
    on_disk = entry == DISK
    return TensorPlacement(ref, CPU if on_disk else entry, on_disk, execution)  # type: ignore[arg-type]


def _outer_names(name: str) -> list[str]:
    """Return the name and those of the modules around it, the nearest first."""
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _devices(count: int) -> str:
    return ", ".join([*map(str, range(count)), "'cpu'", "'disk'"])


def _quoted_names(names: list[str], limit: int = 5) -> str:
    return join_names((f"'{name}'" for name in names), limit)
