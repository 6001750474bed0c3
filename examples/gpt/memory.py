"""The most memory that tensors take at once while a function runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(device: torch.device, step: Callable[[], object]) -> int:
    """In a second call of `step`, on this device: all tensors that it reads or makes.

    CUDA's allocator counts. On the CPU, each operator is asked for the tensors that it saw: torch's profiler
    would miss the tensors that gloo's threads free.
    """
    if device.type == "cuda":
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    with _LiveBytes() as live:
        step()  # shows what is there from step to step
        live.peak = 0
        step()
    return live.peak


class _LiveBytes(TorchDispatchMode):
    """`peak` is the most bytes of storages that operators saw under it and that were alive after one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it will call the operator on this rank's shards
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, results)):
            if isinstance(tensor, Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                self._storages[reference.cdata] = reference
        self.peak = max(self.peak, self._count())
        return results

    def _count(self) -> int:
        self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}
        # Asked now, because sharding frees gathered weights by resizing their storage.
        alive = (torch.UntypedStorage._new_with_weak_ptr(key) for key in self._storages)
        return sum(storage.nbytes() for storage in alive if storage is not None)
