"""What begins and ends with forward and backward passes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lockstep.offload.weights.groups import WeightGroup


class Forwards(threading.local):
    """Forwards that have begun in this thread, with what is to be restored at their end."""

    def __init__(self) -> None:
        self.stack: list[tuple[WeightGroup, saved_tensors_hooks | None, bool]] = []


class AtEnd:
    """A callback of a backward that is also called when this fails: the engine then only forgets it."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def __call__(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    __del__ = __call__


class own_mode:
    """Neither graphs nor inference tensors: what is made here outlives the mode of the caller."""

    def __enter__(self) -> None:
        self._inference = torch.inference_mode(False)
        self._inference.__enter__()
        self._grad = torch.no_grad()
        self._grad.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._grad.__exit__(*error)
        self._inference.__exit__(*error)
