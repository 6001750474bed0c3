"""What the ways to launch share: the commands that they run or show, the console, the folder of log files.

Signals are in ``signals``, the guard that ends what a launch leaves behind in ``guard_process``, failures in
``report``. Each way is a module of ``BACKENDS``, imported when it is used.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lockstep.errors import ConfigError
from lockstep.launch import exec_worker
from lockstep.launch.plan import LaunchPlan

SECRET = "<secret>"
"""What stands for a secret wherever something is shown."""


@dataclass(frozen=True)
class Command:
    """One program. ``commands(plan)`` of a backend has ``SECRET`` in the place of each secret.

    ``environment``: what the program gets beside the launcher's own environment. ``stdin``: its first line, after which
    its input stays open as long as we live; without it the input is empty, and signals go to the program itself.
    ``title`` says where or what for, such as ``host a, machine 0 of 2``. ``shown``: a line of its output for people.
    """

    arguments: tuple[str, ...]
    title: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: str | None = None
    shown: Callable[[bytes], bytes] = bytes

    def lines(self) -> Iterator[str]:
        """The command for people, in the form that a shell would need."""
        if self.title:
            yield f"{self.title}:"
        yield "  " + shlex.join(self.arguments)
        if self.environment:
            yield "with the environment:"
            yield from (f"  {name}={value}" for name, value in sorted(self.environment.items()))
        if self.stdin is not None:
            yield "with the standard input:"
            yield from ("  " + line for line in self.stdin.splitlines())


BACKENDS = {
    "local": "lockstep.launch.local",
    "hosts": "lockstep.launch.hosts",
    "slurm": "lockstep.launch.slurm",
    "mpi": "lockstep.launch.mpi",
    "ray": "lockstep.launch.ray_cluster",
    "k8s": "lockstep.launch.kubernetes",
}


class Backend(Protocol):
    """What each of the modules has: ``commands``, what would run, and ``launch``, which returns the exit code."""

    def commands(self, plan: LaunchPlan) -> list[Command]: ...

    def launch(self, plan: LaunchPlan) -> int: ...


def backend(name: str) -> Backend:
    """The module of a name in ``BACKENDS``."""
    return importlib.import_module(BACKENDS[name])


def say(text: str) -> None:
    """Complete lines of the launcher's own, after all that was printed before."""
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def make_log_folder(path: str | None) -> None:
    """Make the folder of ``--log-dir``, if there is one; raises ConfigError."""
    if path is None:
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--log-dir {path}: cannot be made: {reason}. Name another directory.") from None


def worker_arguments(command: tuple[str, ...]) -> tuple[str, ...]:
    """Arguments of the interpreter for a worker whose life is tied to that of this process."""
    # -I -S: neither the user's site nor PYTHON* variables concern the program in between
    return ("-I", "-S", os.path.abspath(exec_worker.__file__), str(os.getpid()), *command)
