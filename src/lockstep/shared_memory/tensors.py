"""The memory of a call's tensors: contiguous, and as addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.shared_memory.algorithms import Memory, memory_of
from lockstep.torch_internals.tensors import storage_key


def check_memory(tensor: Tensor) -> None:
    """Raise UsageError for a tensor, of any shape, whose memory is not this process's ordinary memory."""
    if not tensor.is_cpu or tensor.layout != torch.strided:
        raise UsageError(
            f"The backend shm carries dense CPU tensors, not a {tensor.layout} one on {tensor.device}. Convert it, "
            "or use the backend of that device."
        )


class CallTensors:
    """Contiguous memory for the tensors of one call: their own where they are contiguous, copies where not."""

    def __init__(self) -> None:
        self.keeps: list[Tensor] = []
        self._back: list[tuple[Tensor, Tensor]] = []
        # By storage.
        self._written: dict[int, list[Memory]] = {}

    def read(self, tensor: Tensor) -> Memory:
        """Return the memory of a tensor, of any shape, that is sent."""
        check_memory(tensor)
        # A contiguous tensor is not copied: it is read where it lies, when the call's turn comes.
        dense = tensor.detach().contiguous()
        self.keeps.append(dense)
        return memory_of(dense)

    def write(self, tensor: Tensor, reads: bool = False) -> Memory:
        """Return the memory of a tensor, of any shape, that is written, and also read first where ``reads``."""
        check_memory(tensor)
        if tensor.is_contiguous():
            block = memory_of(tensor)
            others = self._written.setdefault(storage_key(tensor), [])
            # What an earlier tensor of the call shares would be read after that has been written.
            if not (reads and any(_overlap(block, other) for other in others)):
                others.append(block)
                self.keeps.append(tensor)
                return block
        dense = (
            tensor.detach().clone(memory_format=torch.contiguous_format)
            if reads
            else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        )
        self.keeps.append(dense)
        self._back.append((tensor.detach(), dense))
        return memory_of(dense)

    def apart_from(self, block: Memory, others: Sequence[Memory]) -> Memory:
        """Return the block, or a copy of it if it lies in the memory of one of the others."""
        for other in others:
            if _overlap(block, other):
                copy = block.flat.clone()
                self.keeps.append(copy)
                return memory_of(copy)
        return block

    def finish(self) -> None:
        """Copy back what was written into copies."""
        for tensor, dense in self._back:
            tensor.copy_(dense)


def _overlap(one: Memory, other: Memory) -> bool:
    return one.address < other.address + other.size and other.address < one.address + one.size
