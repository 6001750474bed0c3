"""Bytes of this rank at the peak, by category. Counted once, and again when the peak has grown."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.observe.state_bytes import count_state
from lockstep.parallel.parallel_model import ParallelModel

logger = logging.getLogger("lockstep.measures")

EVERY_S = 1.0
CHANGE = 0.01
"""Of the peak, from which on it is another one."""


def allocated_bytes(device: torch.device) -> int | None:
    """Return how much there is now: of torch's allocator on a CUDA device, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    # Here, as only a run that trains needs it.
    import psutil

    return int(psutil.Process().memory_info().rss)


class MemoryOfSteps:
    """The peak is that of torch's allocator on a CUDA device, and of the process on a CPU.

    Weights, gradients and state are counted tensor by tensor behind the backward of a whole window, which takes a
    microsecond for each: in the second step, when all of them are there, and after a peak that is higher by 1 %.
    ``other`` is what was there before the first forward and is no weight: buffers, and on a CPU the program itself.
    ``activations`` is the rest, with gathered weights and messages. Where the peak was reached before the first
    forward, nobody knows what the rest is, and all of it is ``other``.

    Args:
        may_look: Optimizers step in the main thread, so that their state can be looked at.
    """

    def __init__(
        self,
        device: torch.device,
        models: Sequence[ParallelModel],
        optimizers: Callable[[], Sequence[Any]],
        may_look: bool,
    ) -> None:
        self._device = device
        self._models = models
        self._optimizers = optimizers
        self._may_look = may_look
        self._steps = 0
        self._next = 0.0
        self._state: dict[str, int] = {}
        self._before: tuple[int, int] | None = None
        self.is_due = False
        self.latest: dict[str, int] = {}

    def training_begins(self) -> None:
        """The first forward comes."""
        allocated, peak = allocated_bytes(self._device), self._peak()
        if allocated is not None and peak is not None:
            self._before = allocated, peak

    def look(self) -> None:
        """Count the state, behind a backward."""
        self.is_due = False
        try:
            counted = count_state(self._models, self._optimizers())
        except Exception as error:
            # No run may depend on tensors of another library.
            logger.debug("The memory of optimizer states cannot be counted: %s", error)
            self._may_look = False
            return
        self._state = {
            "weights": counted.weights,
            "gradients": counted.gradients,
            "optimizer": counted.optimizer,
        }

    def new(self) -> dict[str, int] | None:
        """Called at the end of each step: what is known, where that is another than before. Looks once a second."""
        self._steps += 1
        now = time.monotonic()
        if not self._may_look or (self._steps > 2 and now < self._next):
            return None
        self._next = now + EVERY_S
        peak = self._peak()
        if peak is None:
            return None
        has_grown = peak > self.latest.get("peak", 0) * (1 + CHANGE)
        # The first step makes the optimizer's state: it is counted behind the next backward.
        if self._steps == 1:
            self.is_due = True
            return None
        if not self._state or (not has_grown and self.latest):
            return None
        if has_grown and self.latest:
            self.is_due = True
        self.latest = {**self._state, **self._unaccounted(peak), "peak": peak}
        return self.latest

    def _unaccounted(self, peak: int) -> dict[str, int]:
        rest = max(0, peak - sum(self._state.values()))
        if self._before is None or peak <= self._before[1]:
            return {"other": rest}
        other = min(rest, max(0, self._before[0] - self._state["weights"]))
        return {"activations": rest - other, "other": other}

    def _peak(self) -> int | None:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if self._device.type != "cpu":
            return None
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # Linux counts in KiB, macOS in bytes.
        return most if sys.platform == "darwin" else most * 1024
