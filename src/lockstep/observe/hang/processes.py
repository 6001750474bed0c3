"""What the system says of a process of this machine: what it does, and how long it has waited for a processor.

A process that waits for a processor is slow, and neither stuck nor silent by its own fault.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

WORDS = {
    "R": "running",
    "S": "sleeping",
    "I": "sleeping",
    "D": "uninterruptible",
    "T": "stopped",
    "t": "stopped",
}
WORDS |= {"Z": "zombie", "X": "gone"}


class ProcessState(NamedTuple):
    """``word``: "running", "sleeping", "stopped", "uninterruptible", "zombie", "gone" or "unknown". ``waited_s``: how
    long its threads have waited for a processor so far, all together."""

    word: str = "unknown"
    waited_s: float = 0.0


def process_state(pid: int) -> ProcessState:
    """Return the state of a process in this process's namespace."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ProcessState("gone" if Path("/proc/self/stat").exists() else "unknown")
    except (OSError, IndexError):
        return ProcessState()
    return ProcessState(WORDS.get(letter, "unknown"), waited_s(pid))


def waited_s(pid: int) -> float:
    """Return seconds in which threads of a process could run and had no processor; 0.0 where the system does not
    tell."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0.0
    return sum(_waited_ns(f"/proc/{pid}/task/{thread}/schedstat") for thread in threads) / 1e9


def waited_of_main_thread_s() -> float:
    """Return the same of this process's main thread."""
    return _waited_ns(f"/proc/{os.getpid()}/schedstat") / 1e9


def _waited_ns(path: str) -> int:
    """Return a thread has: its time on a processor, in the queue for one, both in ns, and its turns."""
    try:
        return int(Path(path).read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def machine_of_process() -> str:
    """Equal for processes that see the same ones under the same numbers: those of one machine, and one container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
