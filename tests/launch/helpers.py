"""Starting the real launcher, and watching processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.command import LOCKSTEP

COMMAND = [*LOCKSTEP, "launch"]
START_LIMIT_S = 180.0


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what concerns a run, and without the user's configuration."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    return {**clean, "LOCKSTEP_CONFIG_FILE": "", "XDG_CONFIG_HOME": "/nonexistent", **extra}


def run(*arguments: object, **extra: str) -> subprocess.CompletedProcess[str]:
    """The launcher, to its end."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(
        command, env=environment(**extra), capture_output=True, text=True, timeout=START_LIMIT_S, check=False
    )


def start(*arguments: object, **extra: str) -> subprocess.Popen[str]:
    """The launcher, running."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


WAITING = "import os, time; open(f'pids/{os.getpid()}', 'w').close(); time.sleep(600)"
"""A script that notes its process id in the folder ``pids``, and stays."""


def check_ends_with(launcher: subprocess.Popen[str], directory: Path) -> None:
    """Two workers that run ``WAITING`` end when their launcher is killed."""
    try:
        workers = pids_in(directory, 2)
        assert all(alive(pid) for pid in workers)
        launcher.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(alive(pid) for pid in workers), 2)
    finally:
        launcher.kill()
        launcher.communicate()


def wait_until(condition: Callable[[], bool], limit_s: float) -> float:
    """Seconds until the condition held. Raises AssertionError after ``limit_s``."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit_s, f"not within {limit_s} s"
        time.sleep(0.01)
    return time.monotonic() - started


def pids_in(directory: Path, count: int) -> list[int]:
    """The process ids that workers wrote as file names, once there are ``count``."""
    wait_until(lambda: len(list(directory.iterdir())) >= count, START_LIMIT_S)
    return [int(path.name) for path in directory.iterdir()]
