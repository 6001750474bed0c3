"""The memory that one rank may take, what it has taken at most, and its end before the system ends it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from lockstep.runtime.host_memory import free_host_bytes

EVERY_S = 0.01


def limit_of_rank(asked: int | None, device: torch.device, local_ranks: int) -> int:
    """Return bytes that this rank may take on ``device``; on a CPU those of its process.

    Without ``asked`` it is what is free now and what this process has: on a CPU its part of that of ``local_ranks``.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) if asked is None else min(asked, int(total))
    return asked if asked is not None else resident() + free_host_bytes() // local_ranks


def enforce(limit: int, device: torch.device) -> None:
    """Raise ``OutOfMemoryError`` on CUDA for what goes beyond the limit from now on."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)


def resident() -> int:
    """Return bytes of this process that are in memory."""
    return int(psutil.Process().memory_info().rss)


def peak_of_rank(device: torch.device) -> int:
    """Return the most bytes that this rank has taken: of torch's allocator on CUDA, else of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        # Of this program alone; what getrusage says begins with the most that its parent has had.
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class MemoryWatch(threading.Thread):
    """Looks whether this process has more than ``limit`` bytes in memory, and calls ``over`` with these, once.

    So a rank ends by itself and is named, before the system picks a process to kill, which may be another one.
    """

    def __init__(self, limit: int, over: Callable[[int], None]) -> None:
        super().__init__(name="lockstep-tune-memory", daemon=True)
        self._limit, self._over = limit, over
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._ended = threading.Event()

    def run(self) -> None:
        try:
            # Kept open, so that a look costs one read.
            with open("/proc/self/statm", "rb", buffering=0) as file:
                while not self._ended.wait(EVERY_S):
                    file.seek(0)
                    taken = int(file.read().split()[1]) * self._page
                    if taken > self._limit:
                        self._over(taken)
                        return
        except OSError:
            # This system has no such file.
            return
