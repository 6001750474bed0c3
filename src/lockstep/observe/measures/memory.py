"""Bytes of this rank at the peak."""

from __future__ import annotations

import resource
import sys
import time

import torch

EVERY_S = 1.0
CHANGE = 0.01
"""Of the peak, from which on it is another one."""


class PeakMemory:
    """The peak of torch's allocator on a CUDA device, and of the process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next = 0.0
        self.latest: dict[str, int] = {}

    def new(self) -> dict[str, int] | None:
        """Return the peak where it has grown. Called at the end of each step; looks once a second."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + EVERY_S
        peak = self._peak()
        if peak is None or peak <= self.latest.get("peak", 0) * (1 + CHANGE):
            return None
        self.latest = {"peak": peak}
        return self.latest

    def _peak(self) -> int | None:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if self._device.type != "cpu":
            return None
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # Linux counts in KiB, macOS in bytes.
        return most if sys.platform == "darwin" else most * 1024
