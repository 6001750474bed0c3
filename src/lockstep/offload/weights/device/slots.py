"""Memory of a device in which weights take turns."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from lockstep.errors import OffloadError
from lockstep.offload.copies import Copies, Event
from lockstep.torch_internals import tensors as torch_tensors

ALIGNMENT = 256
"""Of each tensor in a slot, in bytes; as good as an allocation of its own to the kernels that read it."""


@dataclass(eq=False)
class Slot:
    """Bytes of the device that hold one unit at a time."""

    buffer: torch.Tensor
    free: Event  # nothing reads or writes it after this
    own_uses: int | None  # of its storage, while only the slot has it; None where this cannot be told

    @property
    def nbytes(self) -> int:
        return self.buffer.numel()

    @property
    def storage(self) -> int:
        """What tells this slot's memory from all others that are alive."""
        return storage_of(self.buffer)

    def is_held(self, views: int) -> bool:
        """Whether somebody holds its memory besides ``views`` tensors; False where this cannot be told."""
        uses = _uses(self.buffer)
        return uses is not None and self.own_uses is not None and uses > self.own_uses + views


class Slots:
    """Slots of one device, at most ``budget`` bytes in all.

    A slot is used again for a unit of the same size. Where torch does not tell who else holds a slot's memory,
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
        """A slot of ``nbytes``.

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
            return Slot(buffer, self._copies.computed(), _uses(buffer))

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
                f"budget of {self.budget} are in use. Raise the budget, or let go of tensors that share memory "
                "with weights."
            )

    def _drop(self, slot: Slot) -> None:
        self._copies.compute_after(slot.free)  # the allocator gives its memory to what computes next
        self._free.remove(slot)
        self.allocated_bytes -= slot.nbytes


def storage_of(tensor: torch.Tensor) -> int:
    """The address of what holds a tensor's memory: equal for views of one tensor."""
    return torch_tensors.storage_key(tensor)


def _uses(tensor: torch.Tensor) -> int | None:
    """How many hold the tensor's storage; None if this torch does not tell."""
    return torch_tensors.storage_uses(tensor)
