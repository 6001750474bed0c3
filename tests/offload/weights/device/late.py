"""Copies that are done as late as the order of events allows, so that whoever forgets to wait sees old numbers."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class LateCopies:
    """Copies of a device whose memory is the CPU's: each is done when somebody waits for it, and not before.

    Memory that is freed before its copy is done fails the test. ``log`` has what was asked for, in order; copies
    have numbers, and events of copies the number of the last one.
    """

    def __init__(self, pinned: bool = True) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.queue: list[tuple[_Memory, _Memory]] = []
        self.done = 0
        self.computations = 0
        self.pinned = pinned
        self.lock = threading.Lock()  # a streamer loads in a thread of its own
        self.host_buffers = 0
        self.made: list[StorageWeakRef] = []  # on the device

    def follow(self) -> None:
        pass

    def computed(self) -> Any:
        """A number as text: what was computed is done at once."""
        self.computations += 1
        self.log.append(("computed", str(self.computations)))
        return str(self.computations)

    def after(self, event: Any) -> None:
        self.log.append(("after", event))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.stride() == source.stride() or target.shape == source.shape
        self.queue.append((_Memory(target), _Memory(source)))
        self.log.append(("copy", len(self.queue)))

    def copied(self) -> Any:
        return len(self.queue)

    def compute_after(self, event: Any) -> None:
        self.log.append(("compute after", event))
        self._finish(event)

    def is_done(self, event: Any) -> bool:
        return event <= self.done

    def wait(self, event: Any) -> None:
        self.log.append(("host waits", event))
        self._finish(event)

    def reads(self, host: torch.Tensor) -> bool:
        return self.pinned

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        self.host_buffers += 1
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        made = torch.full((nbytes,), 0xFF, dtype=torch.uint8)  # NaN
        self.made.append(StorageWeakRef(made.untyped_storage()))
        return made

    def _finish(self, event: Any) -> None:
        if isinstance(event, str):
            return
        with self.lock, torch.no_grad():
            while self.done < event:
                target, source = self.queue[self.done]
                target.tensor().copy_(source.tensor())
                self.done += 1


class _Memory:
    """A tensor that is not kept."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.layout = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, "memory was freed before its copy was done"
        dtype, offset, shape, stride = self.layout
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
