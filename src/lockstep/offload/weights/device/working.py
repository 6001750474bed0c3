"""What stands on the device for weights that are at rest in host memory: slots in which they take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.errors import OffloadError, UsageError
from lockstep.offload.copies import Copies, Event, dense_strides, view_of
from lockstep.offload.weights.groups import WeightGroup
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals import tensors as torch_tensors

ALIGNMENT = 256
"""Of each tensor in a slot, in bytes; as good as an allocation of its own to the kernels that read it."""


@dataclass(eq=False)
class Slot:
    """Bytes of the device that hold one group at a time."""

    buffer: torch.Tensor
    # Nothing reads or writes it after this.
    free: Event
    # Uses of its storage while only the slot has it; None where this cannot be told.
    own_uses: int | None

    @property
    def nbytes(self) -> int:
        return self.buffer.numel()

    @property
    def storage(self) -> int:
        """What tells this slot's memory from all others that are alive."""
        return torch_tensors.storage_key(self.buffer)

    def is_held(self, views: int) -> bool:
        """Return whether somebody holds its memory besides ``views`` tensors; False where this cannot be told."""
        uses = torch_tensors.storage_uses(self.buffer)
        return uses is not None and self.own_uses is not None and uses > self.own_uses + views


class Slots:
    """Slots of one device, at most ``budget`` bytes in all.

    A slot is used again for a group of the same size. Where torch does not tell who else holds a slot's memory,
    no slot is.
    """

    def __init__(self, copies: Copies, budget: int | None = None) -> None:
        self.budget = budget
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self._copies = copies
        self._free: list[Slot] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Slot:
        """Return a slot of ``nbytes``.

        Raises:
            OffloadError: with it the slots in use are more than the budget.
        """
        with self._lock:
            for slot in self._free:
                if slot.nbytes == nbytes:
                    self._free.remove(slot)
                    return slot
            self._make_room(nbytes)
            buffer = self._copies.device_bytes(nbytes)
            self.allocated_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
            return Slot(buffer, self._copies.computed(), torch_tensors.storage_uses(buffer))

    def give_back(self, slot: Slot, last_use: Event) -> None:
        """Nobody uses ``slot`` after ``last_use``."""
        slot.free = last_use
        with self._lock:
            self._free.append(slot)
            if slot.own_uses is None:
                self._drop(slot)

    def clear(self) -> None:
        """Give the memory of free slots back to the device."""
        with self._lock:
            for slot in list(self._free):
                self._drop(slot)

    def _make_room(self, nbytes: int) -> None:
        if self.budget is None:
            return
        while self._free and self.allocated_bytes + nbytes > self.budget:
            self._drop(self._free[0])
        if self.allocated_bytes + nbytes > self.budget:
            raise OffloadError(
                f"{nbytes} bytes of weights are needed on the device, but {self.allocated_bytes} bytes of the "
                f"budget of {self.budget} are in use. Raise the budget, or delete tensors that share memory with "
                "weights."
            )

    def _drop(self, slot: Slot) -> None:
        # The allocator gives its memory to what computes next.
        self._copies.compute_after(slot.free)
        self._free.remove(slot)
        self.allocated_bytes -= slot.nbytes


class WorkingTensor:
    """The tensor that the model computes with in the place of ``host_tensor``, a parameter or buffer.

    It is one object for good: autograd, autocast and the user may keep it. Its memory is a part of a slot while
    the group is loaded; otherwise all its numbers are one NaN (zero where its dtype has none).
    """

    def __init__(self, name: str, host_tensor: torch.Tensor, offset: int, device: torch.device) -> None:
        if type(host_tensor) not in (nn.Parameter, torch.Tensor) or host_tensor.layout is not torch.strided:
            raise UsageError(
                f"'{name}' is a {type(host_tensor).__name__} of layout {host_tensor.layout}, but only plain "
                "tensors can be offloaded. Leave its module out of offload."
            )
        if host_tensor.device.type != "cpu":
            raise UsageError(
                f"'{name}' is on {host_tensor.device}, but offloaded weights must begin in host memory. Move it "
                "to the CPU first."
            )
        self.name = name
        self.host_tensor = host_tensor
        # Bytes from the beginning of its slot.
        self.offset = offset
        self.stride = dense_strides(host_tensor)
        self._nothing = _nothing(host_tensor, device)
        self.is_parameter = isinstance(host_tensor, nn.Parameter)
        if self.is_parameter:
            self.tensor: torch.Tensor = nn.Parameter(self._nothing, requires_grad=host_tensor.requires_grad)
            # What libraries mark parameters with.
            self.tensor.__dict__.update(host_tensor.__dict__)
        else:
            self.tensor = self._nothing.detach()
        # Changes of the host tensor of which its version does not tell.
        self.edits = 0
        self._written = torch_tensors.version(self.tensor)

    @property
    def nbytes(self) -> int:
        return self.host_tensor.numel() * self.host_tensor.element_size()

    def host_state(self) -> tuple[int, ...]:
        """Return what changes whenever the host tensor is written to or gets other memory."""
        return self.host_tensor.data_ptr(), torch_tensors.version(self.host_tensor), self.edits

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever it is written to, here or on the host, other than through ``.data``."""
        return torch_tensors.version(self.host_tensor), torch_tensors.version(self.tensor)

    def part_of(self, buffer: torch.Tensor) -> torch.Tensor:
        return view_of(buffer, self.host_tensor.dtype, self.host_tensor.shape, self.stride, self.offset)

    def use(self, buffer: torch.Tensor) -> None:
        self.tensor.data = self.part_of(buffer)

    def use_nothing(self) -> None:
        self.tensor.data = self._nothing

    def record_version(self) -> None:
        """Have what is written to it from now on get to the host."""
        self._written = torch_tensors.version(self.tensor)

    @property
    def is_written(self) -> bool:
        return torch_tensors.version(self.tensor) != self._written


class WorkingWeights:
    """Where a group's modules have its tensors."""

    def __init__(self, group: WeightGroup, working: dict[int, WorkingTensor]) -> None:
        self._places: list[
            tuple[nn.Module, Callable[[nn.Module], torch_modules.Registered], str, WorkingTensor]
        ] = []
        self._flat: list[nn.Module] = []
        visited: set[int] = set()
        for root in group.modules:
            for module in root.modules():
                if id(module) in visited:
                    continue
                visited.add(id(module))
                before = len(self._places)
                for registered in torch_modules.REGISTERED:
                    for key, tensor in registered(module).items():
                        if id(tensor) in working:
                            self._places.append((module, registered, key, working[id(tensor)]))
                if len(self._places) > before and torch_modules.has_flat_weights(module):
                    self._flat.append(module)

    def check(self) -> None:
        """Raise UsageError if a module has other tensors than those that are streamed."""
        for working, _ in self.replaced():
            raise UsageError(
                f"'{working.name}' was replaced in the model after streaming of its weights had begun. Write to "
                "it in place, or call stop_streaming(model) before you replace it, and start streaming again "
                "afterwards."
            )

    def put_working(self) -> None:
        self.check()
        for module, registered, key, working in self._places:
            registered(module)[key] = working.tensor
        self._renew_flat_weights()

    def put_host_tensors(self) -> None:
        for module, registered, key, working in self._places:
            registered(module)[key] = working.host_tensor
        self._renew_flat_weights()

    def replaced(self) -> Iterator[tuple[WorkingTensor, torch.Tensor | None]]:
        """Yield what a forward has put in the place of a working tensor, and of which."""
        for module, registered, key, working in self._places:
            tensor = registered(module).get(key)
            if tensor is not working.tensor and tensor is not working.host_tensor:
                yield working, tensor

    def trained(self) -> set[WorkingTensor]:
        """Return what belongs to modules in training mode."""
        return {working for module, *_, working in self._places if module.training}

    def _renew_flat_weights(self) -> None:
        # Recurrent modules keep a list of their own.
        for module in self._flat:
            torch_modules.renew_flat_weights(module)


def lay_out(group: WeightGroup, device: torch.device) -> tuple[list[WorkingTensor], int]:
    """Return the working tensors of a group, one behind the other in a slot, and the slot's bytes."""
    found = []
    end = 0
    for name, host_tensor in group.tensors.items():
        found.append(WorkingTensor(name, host_tensor, end, device))
        end += -(-found[-1].nbytes // ALIGNMENT) * ALIGNMENT
    return found, end


def write_back(copies: Copies, written: list[tuple[WorkingTensor, torch.Tensor]]) -> None:
    """Copy what a forward wrote, and wait: the host tensor may be looked at from now on."""
    if not written:
        return
    copies.after(copies.computed())
    for working, tensor in written:
        if tensor.shape != working.host_tensor.shape or tensor.dtype != working.host_tensor.dtype:
            raise UsageError(
                f"A forward has replaced '{working.name}', {tuple(working.host_tensor.shape)} "
                f"{working.host_tensor.dtype}, by {tuple(tensor.shape)} {tensor.dtype}. Change it outside of "
                "forward, or leave it out of offload."
            )
        # Through .data: for graphs the weight has not changed.
        copies.copy(working.host_tensor.data, tensor.detach())
    copies.wait(copies.copied())


def _nothing(host_tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    number = float("nan") if host_tensor.is_floating_point() or host_tensor.is_complex() else 0
    return torch.tensor(number, device=device).to(host_tensor.dtype).expand(host_tensor.shape)
