"""The ways to launch: name -> module, which is imported when it is used.

Each module has ``commands(plan) -> list[Command]``, what would run, and ``launch(plan) -> int``, which runs
it and returns the exit code.
"""

from __future__ import annotations

import importlib
from typing import Protocol

from lockstep.launch.command import Command
from lockstep.launch.plan import LaunchPlan

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
