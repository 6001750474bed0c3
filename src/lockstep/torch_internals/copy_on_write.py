"""Clones that share memory with a tensor until one of both is written to."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.torch_internals.versions import undisturbed


def lazy_clone(tensor: Tensor) -> Tensor | None:
    """Return a clone of a tensor of any shape that takes no memory yet; None where memory cannot be shared like that.

    Only host memory is. On a device, what was queued before may still be writing when memory is handed on.

    Whatever asks torch for the address of either in order to write, also ``tensor.data``, a view or ``numpy()``, makes
    a copy of the memory first, if the other is there still. So the clone keeps the values of now.

    Relies on: ``_lazy_clone`` refuses memory that torch has not allocated by itself, such as mapped files.
    """
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or not _is_available():
        return None
    try:
        return torch._lazy_clone(tensor)
    except RuntimeError:
        return None


def is_shared(tensor: Tensor) -> bool:
    """Return whether a tensor has been cloned lazily and its memory was not asked for since. Reads no memory."""
    # The stubs lack the function.
    core: Any = torch._C
    return bool(core._is_cow_tensor(tensor))


def take_back(tensor: Tensor) -> None:
    """Let the tensor's memory be its own again, where it is: its clones must be gone. Several threads may write then.

    Relies on: ``data_ptr`` is asked for in order to write. Of a resized storage torch then raises an assertion.

    Raises:
        UsageError: its storage was resized while it was shared.
    """
    # Memory that was freed need not be its own.
    if not tensor.untyped_storage().nbytes():
        return
    try:
        tensor.data_ptr()
    except RuntimeError as error:
        raise UsageError(
            f"The storage of a tensor of shape {list(tensor.shape)} was resized (untyped_storage().resize_) while "
            "save_state(blocking=False) shared its memory, and torch cannot use it any more. Call "
            "accelerator.wait_for_checkpoint() before you resize storages."
        ) from error


@functools.cache
def _is_available() -> bool:
    """Return whether this torch can do it, tried once: without, memory is copied when it is asked for."""
    try:
        with undisturbed():
            return _works()
    except Exception:
        return False


def _works() -> bool:
    tensor = torch.arange(6.0)
    clone = torch._lazy_clone(tensor)
    was_shared = is_shared(tensor) and is_shared(clone)
    # No version tells of a write to ``data``.
    tensor.data[1:].fill_(7)
    is_apart = clone.tolist() == [0, 1, 2, 3, 4, 5] and tensor.tolist() == [0, 7, 7, 7, 7, 7]
    # The only clone goes: the memory must be the tensor's own again, at the same address.
    other = torch.zeros(4)
    address, clone = other.data_ptr(), torch._lazy_clone(other)
    del clone
    take_back(other)
    return was_shared and is_apart and other.data_ptr() == address and not is_shared(other)
