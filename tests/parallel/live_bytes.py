"""Bytes of tensors that are alive, whoever holds them: the oracle of tests on memory."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Follows every storage that an operator inside returns or changes, until it is freed.

    ``now()``: bytes of these alive; ``peak``: the largest such number after any operator. A storage that torch
    resizes to nothing counts as nothing, and one that grows does from the next operator on that touches it.
    Tensors from before that no operator touches are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._at_most = 0  # the sum of the sizes in there, some of which may have shrunk since

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "device_mesh") for kind in types):
            return NotImplemented  # a DTensor: its operators on local tensors are seen
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and not hasattr(tensor, "placements"):
                storage = tensor.untyped_storage()
                if storage.device.type != "meta":  # as those of DTensor's rules of propagation
                    self._see(storage)
        if self._at_most > self.peak:  # else counting, which takes long, cannot find more
            self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        alive = [storage for ref, _ in self._storages.values() if (storage := ref()) is not None]
        self._storages, self._at_most = {}, 0
        for storage in alive:
            self._see(storage)
        return self._at_most

    def _see(self, storage: torch.UntypedStorage) -> None:
        _, before = self._storages.get(storage._cdata, (None, 0))
        size = storage.nbytes()
        self._storages[storage._cdata] = (weakref.ref(storage), size)
        self._at_most += size - before


def reachable_bytes() -> int:
    """Of all tensors that Python objects hold now, each storage once, beside memory that ranks share for messages."""
    gc.collect()
    shared = shared_ranges()
    storages: dict[int, int] = {}
    for item in gc.get_objects():
        # Looking at the class alone: attributes of strange objects may run code.
        if issubclass(type(item), torch.Tensor) and not hasattr(item, "placements") and not item.is_meta:
            storage = item.untyped_storage()
            if not any(storage.data_ptr() in range_ for range_ in shared):
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def shared_ranges() -> list[range]:
    """Addresses of the memory that the backend ``shm`` has mapped."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    bounds = [line.split()[0].split("-") for line in maps if "memfd:lockstep" in line]
    return [range(int(first, 16), int(last, 16)) for first, last in bounds]
