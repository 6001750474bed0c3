"""Buffers that a forward changes, such as running statistics, in a forward that is run again for backward."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals import tensors as torch_tensors


class BuffersOnce:
    """Inside this context, those buffers that a forward changes are copies, as they were before the forward.

    Which ones these are is learned: the first forward copies all, later ones those that changed before. One
    that changes for the first time later on is not seen as it was, but is not changed twice either.
    """

    def __init__(self, block: Any) -> None:
        self.block = block
        known: set[str] | None = getattr(block, "_changed_buffers", None)
        self.before: dict[str, Any] = dict(block.named_buffers(remove_duplicate=False))
        self.versions = {name: _version(tensor) for name, tensor in self.before.items()}
        self.copies = {
            name: tensor.detach().clone()
            for name, tensor in self.before.items()
            if known is None or name in known
        }

    def forget_unchanged(self) -> None:
        if not self.before:
            return
        known: set[str] = getattr(self.block, "_changed_buffers", set()) | self._changed()
        self.block._changed_buffers = known
        self.copies = {name: kept for name, kept in self.copies.items() if name in known}
        self.before = {}

    def _changed(self) -> set[str]:
        changed = set()
        for path, module in self.block.named_modules():
            # Running statistics change without a new version.
            certain = getattr(module, "track_running_stats", False)
            for key, tensor in module.named_buffers(prefix=path, recurse=False):
                same = self.before.get(key) is tensor and self.versions[key] == _version(tensor)
                if certain or not same:
                    changed.add(key)
        return changed

    def __enter__(self) -> None:
        names = getattr(self.block, "_changed_buffers", ())
        self.current = {name: self.block.get_buffer(name) for name in names}
        for name, tensor in self.current.items():
            self._set(name, self.copies.get(name, tensor).detach().clone())

    def __exit__(self, *error: Any) -> None:
        for name, tensor in self.current.items():
            self._set(name, tensor)
        self.current = {}

    def _set(self, name: str, tensor: torch.Tensor) -> None:
        path, _, key = name.rpartition(".")
        torch_modules.buffers_of(self.block.get_submodule(path))[key] = tensor


def _version(tensor: Any) -> int:
    return 0 if tensor.is_inference() else torch_tensors.version(tensor)
