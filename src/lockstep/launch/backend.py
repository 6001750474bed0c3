"""What the ways to launch share: the commands that they run or show, secrets, and which variables of the environment
travel to other machines.

The console and log files are in ``console``, signals in ``signals``, the guard that ends what a launch leaves behind
in ``guard_process``, failures in ``report``. Each way is a module of ``BACKENDS``, imported when it is used.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lockstep.config.settings import THREADS_VARIABLE
from lockstep.config.sources import OTHER_VARIABLES, SECRET_VARIABLE, inherited_environment
from lockstep.control import Secret, new_secret, read_secret
from lockstep.errors import ConfigError
from lockstep.launch import bare
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
        """Yield the command for people, in the form that a shell would need."""
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


def get_backend(name: str) -> Backend:
    """Return the module of a name in ``BACKENDS``."""
    return importlib.import_module(BACKENDS[name])


def worker_arguments(command: tuple[str, ...]) -> tuple[str, ...]:
    """Arguments of the interpreter for a worker whose life is tied to that of this process."""
    # -I -S: neither the user's site nor PYTHON* variables concern the program in between
    return ("-I", "-S", os.path.abspath(bare.__file__), "--worker", str(os.getpid()), *command)


def check_secret_file(plan: LaunchPlan) -> None:
    """Raise ConfigError if the file that is to hold the secret does not, also where it would never be read."""
    # Kubernetes and Ray refuse such a file by themselves.
    if plan.secret_file is not None and plan.transport.backend not in ("k8s", "ray"):
        read_secret(Path(plan.secret_file).expanduser())


def secret_for_machines(plan: LaunchPlan) -> Secret:
    """Return that of ``secret_file`` or of LOCKSTEP_SECRET; otherwise a fresh one, which this launcher hands to all.

    Raises:
        ConfigError: it is malformed, or the file cannot be read or is open to others.
    """
    if plan.secret_file is not None:
        return read_secret(Path(plan.secret_file).expanduser())
    given = inherited_environment().get(SECRET_VARIABLE)
    return Secret.from_hex(given) if given else new_secret()


PREFIXES = ("LOCKSTEP_", "NCCL_", "GLOO_", "TORCH_")
NAMES = frozenset(
    {
        THREADS_VARIABLE,
        "CUDA_VISIBLE_DEVICES",
        "PYTHONPATH",
        "PYTHONUNBUFFERED",
        "VIRTUAL_ENV",
        "PATH",
        "LANG",
        "LC_ALL",
    }
)
SECRET_WORDS = re.compile(r"TOKEN|SECRET|KEY|PASSW|CREDENTIAL", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Return whether the value of a variable with this name is not to be shown or kept."""
    return SECRET_WORDS.search(name) is not None


def is_forwarded(name: str) -> bool:
    """Return whether a variable goes along without being named."""
    if is_secret(name) or name in OTHER_VARIABLES:
        return False
    return name in NAMES or name.startswith(PREFIXES)


def forwarded(environ: Mapping[str, str], further: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that travel; ``further`` are names that the user wants, secrets among them or not.

    Raises:
        ConfigError: a name that the user wants is not set.
    """
    names = [name for name in environ if is_forwarded(name)]
    for name in further:
        if name not in environ:
            raise ConfigError(f"forward_env names {name}, which is not set here. Set it, or remove the name.")
        names.append(name)
    return {name: environ[name] for name in sorted(set(names))}


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the same for people: the values of secrets are not there."""
    return {name: SECRET if is_secret(name) else value for name, value in environment.items()}
