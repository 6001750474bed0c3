"""Checks that involve several settings of a run at once; plain functions on values, no pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.errors import ConfigError

MAX_PROCESSES = 1_000_000
MAX_MACHINES = 100_000
MAX_PORT = 65535
MAX_THREADS = 4096
MAX_ACCUMULATION_STEPS = 1_000_000_000


def check_topology(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError when machines, ranks, addresses and numbers of processes contradict each other."""
    machines = settings.get("num_machines") or 1
    rank = settings.get("machine_rank") or 0
    processes = settings.get("num_processes")
    if rank >= machines:
        raise ConfigError(
            f"machine_rank is {rank} with num_machines {machines}: ranks count from 0 to {machines - 1}. "
            f"Correct one of the two."
        )
    if machines > 1:
        for name in ("main_process_ip", "main_process_port"):
            if not settings.get(name):
                raise ConfigError(
                    f"num_machines is {machines}, so every machine must know where to meet, but {name} is not set. "
                    f"Set {name} to that of the machine with rank 0, the same on all machines."
                )
        if processes is None:
            raise ConfigError(
                f"num_machines is {machines} but num_processes is not set. Set it to the total over all machines."
            )
    if processes is not None and processes % machines != 0:
        raise ConfigError(
            f"num_processes is {processes} in total, which does not divide over num_machines {machines}. "
            f"Set a multiple of {machines}."
        )
    check_gpus(settings, machines)


def check_gpus(settings: Mapping[str, Any], machines: int) -> None:
    """Raise ConfigError when fewer GPUs are named than processes run on this machine."""
    gpus, processes = settings.get("gpu_ids"), settings.get("num_processes")
    if not gpus or gpus == "all" or processes is None or settings.get("use_cpu"):
        return
    local, named = processes // machines, len(str(gpus).split(","))
    if local > named:
        raise ConfigError(
            f"gpu_ids names {named} GPUs ({gpus}) for {local} processes on this machine; each needs its own. "
            f"Name {local} GPUs or run {named} processes."
        )
