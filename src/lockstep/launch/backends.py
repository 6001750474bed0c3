"""The ways to launch: name -> module, which is imported when it is used.

Each module has ``commands(plan) -> list[Command]``, what would run, and ``launch(plan) -> int``, which runs
it and returns the exit code.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from lockstep.launch.plan import LaunchPlan

SECRET = "<secret>"
"""What stands for a secret wherever something is shown."""


@dataclass(frozen=True)
class Command:
    """One program. ``commands(plan)`` of a backend has ``SECRET`` in the place of each secret.

    ``environment``: what the program gets beside the launcher's own environment. ``stdin``: what is written
    to it. ``title`` says where or what for, such as ``host a, machine 0 of 2``.
    """

    arguments: tuple[str, ...]
    title: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: str | None = None

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
    """What each of the modules has."""

    def commands(self, plan: LaunchPlan) -> list[Command]: ...

    def launch(self, plan: LaunchPlan) -> int: ...


def backend(name: str) -> Backend:
    """The module of a name in ``BACKENDS``."""
    return importlib.import_module(BACKENDS[name])
