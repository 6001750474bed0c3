"""Checks that involve several settings of a run at once; plain functions on values, no pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from lockstep.config import values
from lockstep.errors import ConfigError

ValuesByName: TypeAlias = Mapping[str, Any]
"""Name of a setting -> its value, of whatever type that has."""

MAX_PROCESSES = 1_000_000
MAX_MACHINES = values.MAX_MACHINES
MAX_PORT = values.MAX_PORT
MAX_THREADS = 4096
MAX_ACCUMULATION_STEPS = 1_000_000_000
MAX_RESTARTS = 1_000_000
ELASTIC_RESTARTS = 1000
"""How often processes start again where machines may leave and join, and nothing else is said."""

LOCAL = "local"
# the settings that choose how machines are reached; their flags have the same names
SWITCHES = ("slurm", "mpi", "ray", "k8s")
HOST_LISTS = ("hosts", "hostfile")
KUBERNETES_KINDS = ("jobset",)
# settings that only some ways of launching have -> those
ONLY_WITH = {
    "slurm_options": ("slurm",),
    "k8s_options": ("k8s",),
    "forward_env": ("hosts", "slurm", "mpi", "ray", "k8s"),
}


def backend_of(settings: Mapping[str, object]) -> str:
    """Return how the machines are reached: ``local``, ``hosts``, ``slurm``, ``mpi``, ``ray`` or ``k8s``.

    Raises:
        ConfigError: two ways are asked for, or a setting belongs to another one.
    """
    asked = [name for name in SWITCHES if settings.get(name)]
    lists = [name for name in HOST_LISTS if settings.get(name)]
    if len(lists) > 1:
        raise ConfigError("hosts and hostfile both name the machines. Give only one of them.")
    if lists and asked != ["mpi"]:  # mpirun takes a list of hosts, too
        asked += lists
    if len(asked) > 1:
        first, second = asked[:2]
        raise ConfigError(
            f"{first} and {second} are two ways to launch (--{first} and --{second}). Give one of them."
        )
    backend = LOCAL if not asked else "hosts" if asked[0] in HOST_LISTS else asked[0]
    for name, backends in ONLY_WITH.items():
        if settings.get(name) and backend not in backends:
            with_what = ", ".join({"hosts": "--hosts or --hostfile"}.get(way, f"--{way}") for way in backends)
            raise ConfigError(
                f"{name} has a meaning only with {with_what}. Add {with_what}, or remove {name}."
            )
    return backend


def check_topology(settings: ValuesByName) -> None:
    """Raise ConfigError when machines, ranks, addresses and numbers of processes contradict each other."""
    backend = backend_of(settings)
    machines = settings.get("num_machines") or 1
    least = settings.get("min_machines") or machines
    rank = settings.get("machine_rank")
    processes = settings.get("num_processes")
    if least > machines:
        raise ConfigError(
            f"min_machines is {least} with num_machines {machines}, but the least cannot be above the most. Correct "
            "one of the two."
        )
    if rank is not None and rank >= machines:
        raise ConfigError(
            f"machine_rank is {rank} with num_machines {machines}: ranks count from 0 to {machines - 1}. "
            f"Correct one of the two."
        )
    if rank and backend != LOCAL:
        raise ConfigError(
            f"machine_rank is {rank}, but one launch starts all machines here, and numbers them. Remove "
            "machine_rank."
        )
    if machines > 1:
        for name in ("main_process_ip", "main_process_port") if backend == LOCAL else ():
            if not settings.get(name):
                raise ConfigError(
                    f"num_machines is {machines}, but {name} is not set, so the machines cannot meet. Add --rdzv "
                    "HOST:PORT to the command on every machine: an address of the first machine, and a free port there."
                )
        if processes is None and not any(settings.get(name) for name in HOST_LISTS):  # they may say slots
            raise ConfigError(
                f"num_machines is {machines} but num_processes is not set. Set it to the total over all machines."
            )
    if processes is not None and processes % machines != 0:
        raise ConfigError(
            f"num_processes is {processes} in total, which does not divide over num_machines {machines}. "
            f"Set a multiple of {machines}."
        )
    check_gpus(settings, machines)


def check_gpus(settings: ValuesByName, machines: int) -> None:
    """Raise ConfigError when fewer GPUs are named than processes run on this machine."""
    gpus, processes = settings.get("gpu_ids"), settings.get("num_processes")
    if not gpus or gpus == "all" or processes is None or settings.get("use_cpu"):
        return
    local, named = processes // machines, len(str(gpus).split(","))
    if local > named:
        raise ConfigError(
            f"gpu_ids names {named} GPUs ({gpus}) for {local} processes on this machine, but each process needs "
            f"a GPU of its own. Name {local} GPUs, or run {named} processes."
        )
