"""Memory over one step: looked at by a thread while the step goes on, once in a run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import torch

MOST_POINTS = 200
SHORTEST_S = 0.0005
"""Between two looks: one takes 15 µs on a CPU."""


def allocated_bytes(device: torch.device) -> Callable[[], int] | None:
    """What tells how much there is now: of torch's allocator on a CUDA device, of the process on a CPU."""
    if device.type == "cuda":
        return lambda: torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    # Here, as only a run that is written needs it.
    import psutil

    process = psutil.Process(os.getpid())
    return lambda: int(process.memory_info().rss)


class StepMemory:
    """Points of one step: seconds since it began, bytes, and in which part the main thread was.

    Args:
        allocated: Asked by a thread of its own.
        part: The part of the step that the main thread is in.
        expected_s: How long a step takes; the looks are spread over that.
    """

    def __init__(self, allocated: Callable[[], int], part: Callable[[], str], expected_s: float) -> None:
        self._allocated = allocated
        self._part = part
        self._every = max(expected_s / MOST_POINTS, SHORTEST_S)
        self._ended = threading.Event()
        self._began = time.perf_counter()
        self._points: list[tuple[float, int, str]] = []
        self._sample()
        self._thread = threading.Thread(target=self._watch, name="lockstep-step-memory", daemon=True)
        self._thread.start()

    def end(self) -> list[tuple[float, int, str]]:
        """The step is over."""
        self._ended.set()
        self._thread.join()
        self._sample()
        return self._points

    def _watch(self) -> None:
        # A step that takes much longer than expected is not followed to its end.
        while len(self._points) < 2 * MOST_POINTS and not self._ended.wait(self._every):
            self._sample()

    def _sample(self) -> None:
        passed, part = time.perf_counter() - self._began, self._part()
        self._points.append((round(passed, 6), self._allocated(), part))
