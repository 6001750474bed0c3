"""Which device each part of a model goes to: accelerators first, then the CPU, then the disk.

Parts are taken in the order of the model and filled into the devices one after another. A part that does not fit is
divided into its children, or else the next device is opened. Where weights of later devices will be brought in for
computing (the first accelerator, and the CPU), room is kept for the largest layer that is still to be placed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.offload.device_map.memory import (
    DeviceName,
    MaxMemory,
    NamedModelPart,
    class_names,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
    get_max_memory,
)
from lockstep.offload.device_map.placement import find_tied_parameters

logger = logging.getLogger(__name__)


def infer_auto_device_map(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, DeviceName]:
    """Choose a device for each part of a model: accelerators first, then the CPU, then the disk.

    Parts are taken in the order of the model. A part that does not fit is divided into its children, or else the next
    device is filled. Room is kept for the largest layer that will be brought in for computing.

    Args:
        model: The model. Its tensors may be on the meta device.
        max_memory: Device -> bytes, as in ``get_max_memory``. The disk need not be named.
        no_split_module_classes: Names of classes of modules that stay whole, such as blocks with a residual
            connection.
        dtype: The dtype that floating-point tensors get when they are loaded.
        special_dtypes: Name of a tensor -> the dtype that it gets.
        verbose: Log each decision.
        clean_result: Join the entries of a module whose parts all go to one device into one entry.
        offload_buffers: Whether buffers are offloaded with the weights beside them. Otherwise a warning tells if the
            accelerators may be too small for them.
        fallback_allocation: True is refused: parts are placed in the order of the model.

    Returns:
        Name of a module or tensor -> index of an accelerator, ``"mps"``, ``"cpu"`` or ``"disk"``.

    Raises:
        ConfigError: a device, a size or a dtype is unknown, or a fallback is asked for.

    Examples:
        ```python
        import torch
        from lockstep import infer_auto_device_map

        model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(3)))  # 40,400 bytes each
        device_map = infer_auto_device_map(model, max_memory={"cpu": "90KB", "disk": "1GB"})
        assert device_map["0"] == "cpu" and device_map["2"] == "disk"
        ```
    """
    if fallback_allocation:
        raise ConfigError(
            "fallback_allocation=True would place later parts of the model before earlier ones, which is not "
            "supported. Leave it out, and name the devices of such parts in a device map."
        )
    limits = get_max_memory(max_memory)
    filling = _Filling(
        limits=limits,
        sizes=compute_module_sizes(model, dtype, special_dtypes),
        ties=find_tied_parameters(model),
        undivided=set(class_names(no_split_module_classes)),
        waiting=[
            *model.named_parameters(recurse=False),
            *model.named_children(),
            *model.named_buffers(recurse=False),
        ],
        level=logging.INFO if verbose else logging.DEBUG,
    )
    device_map = filling.run()
    if not offload_buffers:
        _warn_of_buffers(model, device_map, limits, filling.used, dtype, special_dtypes)
    return _cleaned(device_map) if clean_result else device_map


@dataclass
class _Filling:
    """Devices that are filled one after another with the parts that wait."""

    limits: dict[DeviceName, int]
    sizes: Mapping[str, int]
    ties: list[list[str]]
    undivided: set[str]
    waiting: list[NamedModelPart]
    level: int
    used: dict[DeviceName, int] = field(default_factory=dict)
    placed: dict[str, DeviceName] = field(default_factory=dict)

    def run(self) -> dict[str, DeviceName]:
        self._devices = [*self.limits, *(["disk"] if "disk" not in self.limits else [])]
        self.used = dict.fromkeys(self._devices, 0)
        accelerators = [device for device in self._devices if device not in ("cpu", "disk")]
        # Weights of other devices are brought here to compute with them.
        self._borrowing = {"mps"} if "mps" in accelerators else {*accelerators[:1], "cpu"}
        self._largest, self._largest_names = get_max_layer_size(self.waiting, self.sizes, self.undivided)
        while self.waiting:
            self._treat(*self.waiting.pop(0))
        return self.placed

    def _treat(self, name: str, part: nn.Module | torch.Tensor) -> None:
        self._largest_names = [other for other in self._largest_names if not _within(other, name)]
        # Those of the largest size are placed or being placed: room is kept for the next largest.
        if not self._largest_names:
            self._find_largest()
        size = self.sizes.get(name, 0)
        tied = [
            other for group in ties_across(name, self.ties) for other in group if not _within(other, name)
        ]
        tied_parts = partners(tied, self.waiting)
        # All that is tied to it comes along; the tensors that they share are counted once.
        together = size + sum(
            self.sizes.get(partner, 0) - self.sizes.get(other, 0) for other, (partner, _) in tied_parts
        )
        device = self._devices[0]
        room = self._room(device)
        if room is None or together <= room:
            self._place(name, [partner for _, (partner, _) in tied_parts], together)
            return
        # Alone the part would fit: of a partner nothing but the piece with the tied tensor is needed.
        if (
            tied
            and size <= room
            and self._divide_a_partner(name, part, [partner for _, partner in tied_parts])
        ):
            return
        if size >= room and self._divide(name, part):
            return
        if self.used[device] == 0:
            reserved = self._largest if device in self._borrowing else 0
            logger.info(
                "Nothing goes to device %s, which has insufficient memory: %s needs %d bytes there.",
                device,
                name,
                together + reserved,
            )
        # What was kept free for weights that come to compute counts as used.
        if device in self._borrowing:
            self.used[device] += self._largest
        del self._devices[0]
        self.waiting.insert(0, (name, part))

    def _room(self, device: DeviceName) -> int | None:
        """Return bytes that are left on a device; None: no limit."""
        if device == "disk":
            return None
        return self.limits[device] - self.used[device] - (self._largest if device in self._borrowing else 0)

    def _place(self, name: str, partners: list[str], size: int) -> None:
        device = self._devices[0]
        logger.log(self.level, "%s goes to %s (%d bytes).", " and ".join([name, *partners]), device, size)
        self.used[device] += size
        for each in (name, *partners):
            self.placed[each] = device
        self.waiting = [(other, part) for other, part in self.waiting if other not in partners]

    def _divide(self, name: str, part: nn.Module | torch.Tensor) -> bool:
        """Let the children of a module wait instead of itself; False where it stays whole."""
        if not is_divisible(part, self.undivided):
            return False
        logger.log(self.level, "%s is divided.", name)
        self.waiting = _inside(name, part) + self.waiting
        self._find_largest()
        return True

    def _divide_a_partner(
        self, name: str, part: nn.Module | torch.Tensor, partners: list[NamedModelPart]
    ) -> bool:
        for partner, partner_part in partners:
            if is_divisible(partner_part, self.undivided):
                logger.log(self.level, "%s is divided.", partner)
                index = [other for other, _ in self.waiting].index(partner)
                self.waiting[index : index + 1] = _inside(partner, partner_part)
                self.waiting.insert(0, (name, part))
                self._find_largest()
                return True
        return False

    def _find_largest(self) -> None:
        modules = [(name, part) for name, part in self.waiting if isinstance(part, nn.Module)]
        self._largest, self._largest_names = get_max_layer_size(modules, self.sizes, self.undivided)


def is_divisible(part: nn.Module | torch.Tensor, undivided: Collection[str]) -> bool:
    if not isinstance(part, nn.Module) or type(part).__name__ in undivided:
        return False
    return next(part.children(), None) is not None


def ties_across(name: str, ties: Iterable[list[str]]) -> list[list[str]]:
    """Return the groups of tied names of which some, but not all, are inside of ``name``."""
    inside = ((group, [_within(other, name) for other in group]) for group in ties)
    return [group for group, are in inside if any(are) and not all(are)]


def partners(tied: Iterable[str], parts: list[NamedModelPart]) -> list[tuple[str, NamedModelPart]]:
    """Return for each tied name the waiting part that it is in; those of parts that were placed before are left out."""
    found = []
    for other in tied:
        holder = next(((name, part) for name, part in parts if _within(other, name)), None)
        if holder is not None:
            found.append((other, holder))
    return found


def _within(name: str, module_name: str) -> bool:
    return module_name == "" or f"{name}.".startswith(f"{module_name}.")


def _inside(name: str, part: nn.Module | torch.Tensor) -> list[NamedModelPart]:
    assert isinstance(part, nn.Module)
    own: list[NamedModelPart] = [
        *part.named_parameters(recurse=False),
        *part.named_children(),
        *part.named_buffers(recurse=False),
    ]
    return [(f"{name}.{key}", child) for key, child in own]


def _cleaned(device_map: Mapping[str, DeviceName]) -> dict[str, DeviceName]:
    """Return the same with one entry for each module of which all parts go to one device."""
    devices: dict[str, list[DeviceName]] = {}
    for name, device in device_map.items():
        for module in _ancestors(name):
            devices.setdefault(module, []).append(device)
    cleaned: dict[str, DeviceName] = {}
    for name, device in device_map.items():
        # The chained comparison: several entries, and one device among them.
        whole = (
            module for module in _ancestors(name) if len(devices[module]) > 1 == len(set(devices[module]))
        )
        cleaned[next(whole, name)] = device
    return cleaned


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]


def _warn_of_buffers(
    model: nn.Module,
    device_map: Mapping[str, DeviceName],
    limits: Mapping[DeviceName, int],
    used: Mapping[DeviceName, int],
    dtype: torch.dtype | str | None,
    special_dtypes: Mapping[str, torch.dtype | str] | None,
) -> None:
    accelerators = [device for device in limits if device not in ("cpu", "disk")]
    modules = dict(model.named_modules(remove_duplicate=False))
    needed = sum(
        compute_module_total_buffer_size(modules[name], dtype, special_dtypes)
        for name, device in device_map.items()
        if device in ("cpu", "disk") and name in modules
    )
    if accelerators and needed and all(limits[device] < needed + used[device] for device in accelerators):
        warnings.warn(
            f"Modules on the CPU and the disk have {needed} bytes of buffers, which do not fit on any "
            "accelerator. Pass offload_buffers=True if memory runs out.",
            stacklevel=3,
        )
