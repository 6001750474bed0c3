"""Where this process stands among the others: rank, world size, device, backend and process group."""

from __future__ import annotations

import atexit
import gc
import os
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lockstep
from lockstep import shared_memory
from lockstep.config.enums import CPUBackend
from lockstep.config.handlers import InitProcessGroupKwargs
from lockstep.config.place import TORCHRUN, ProcessEnvironment
from lockstep.config.sources import DEVICE_VARIABLE, named_backend, named_device, process_environment
from lockstep.config.values import join_names, plain
from lockstep.errors import ConfigError, UsageError
from lockstep.runtime.failure import (
    HANDLERS_LIMIT_S,
    TEARDOWN_LIMIT_S,
    end_within,
    forget_departures,
    install_excepthook,
)
from lockstep.torch_internals import c10d, dtensor, gloo


def device_number(environment: ProcessEnvironment) -> int:
    """Return which of the devices that this process sees is its own: the one of its local rank, or the only one.

    Slurm and others can show each task a device of its own (``--gpus-per-task``, ``--gpu-bind``), which is its first.
    """
    is_bound = environment.launcher not in ("none", TORCHRUN.name) and torch.accelerator.device_count() == 1
    return 0 if is_bound else environment.local_rank


def choose_device(local_rank: int, cpu: bool) -> torch.device:
    """Return the device of the process with this rank on its machine: ``cuda:<local_rank>``, else xpu, mps, cpu.

    Raises:
        UsageError: there are accelerators, but fewer than ranks on this machine.
    """
    if cpu:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    if accelerator.type == "mps":
        return torch.device("mps") if local_rank == 0 else torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise UsageError(
            f"Local rank {local_rank} has no device: this machine shows {count} {accelerator.type} device(s). "
            f"Start at most {count} processes here, or pass cpu=True."
        )
    return torch.device(accelerator.type, local_rank)


def device_named(name: str) -> torch.device:
    """Return the device that ACCELERATE_TORCH_DEVICE names: the CPU.

    Raises:
        ConfigError: it is another one, which the numbers of the processes decide.
    """
    if name.partition(":")[0] != "cpu":
        raise ConfigError(
            f"{DEVICE_VARIABLE}={plain(name)} may name cpu only: each process takes the accelerator of its local rank. "
            "Unset it, and choose GPUs by CUDA_VISIBLE_DEVICES."
        )
    return torch.device("cpu")


def choose_backend(device: torch.device, named: str | None = None) -> str:
    """Return the backend of the default group. CPU tensors always have one, for objects and small checks.

    Args:
        named: The one that the environment names for CPU tensors; None: shared memory where every rank is a CPU.

    Raises:
        ConfigError: shared memory was asked for on an accelerator.
    """
    if named == CPUBackend.SHM and device.type in ("cuda", "xpu"):
        raise ConfigError(
            f"The backend is shm, but this process computes on {device}: shared memory carries CPU tensors only. Leave "
            "--backend and LOCKSTEP_BACKEND out, or train with --cpu."
        )
    if device.type == "cuda":
        return "cpu:gloo,cuda:nccl"
    if device.type == "xpu":
        return "cpu:gloo,xpu:xccl"
    # Where memory cannot be shared, the ranks find that out together, and use gloo.
    return str(named or CPUBackend.SHM.value)


@dataclass(frozen=True)
class Runtime:
    """One process of a run. Made once a process by ``start`` and never changed.

    ``backend`` is None where there is no process group (a single process that was not launched).
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str | None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.world_size - 1

    @property
    def control_device(self) -> torch.device:
        """A device whose collectives need no synchronisation with an accelerator, where one exists."""
        if self.backend is None or any(name in self.backend for name in CPU_BACKENDS):
            return torch.device("cpu")
        return self.device


CPU_BACKENDS = (*(backend.value for backend in CPUBackend), "mpi")
THREADS_LET_GO_S = 0.05


class _Process:
    """Owner of this process's one ``Runtime``; the process group is torch's global one."""

    runtime: Runtime | None = None
    made_process_group: bool = False
    at_end: list[Callable[[], None]] = []


def at_end(function: Callable[[], None]) -> None:
    """Call ``function`` once when this process leaves the run, while the process group is still there."""
    _Process.at_end.append(function)


def current_runtime() -> Runtime | None:
    """Return this process's ``Runtime``, or None before ``start``."""
    return _Process.runtime


def start_runtime(cpu: bool = False, init: InitProcessGroupKwargs | None = None) -> Runtime:
    """Join the run that the environment describes and return where this process stands.

    The first call decides; later ones return the same ``Runtime``. A process group that the script
    made itself is used as it is. Under ``torchrun``, ``mpirun``, ``srun``, ``mp.spawn`` with the
    usual variables and ``lockstep launch`` the ranks come from the environment; a plain ``python``
    process is a world of one and gets no process group.

    Raises:
        ConfigError: the environment describes an impossible rank or world.
        UsageError: ``cpu=True`` after the process has started on an accelerator.
    """
    if _Process.runtime is not None:
        if cpu and _Process.runtime.device.type != "cpu":
            raise UsageError(
                f"cpu=True was asked for, but this process already runs on {_Process.runtime.device}. "
                "Pass cpu=True to the first Accelerator or PartialState of the process."
            )
        return _Process.runtime
    install_excepthook()
    init = init or InitProcessGroupKwargs()
    environment = process_environment(need_rendezvous=init.init_method is None)
    named = None if cpu else named_device()
    number = device_number(environment)
    device = choose_device(number, cpu) if named is None else device_named(named)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = _join_process_group(environment, device, init)
    joined = dist.is_available() and dist.is_initialized()
    if joined:
        c10d.probe()
        gloo.probe()
        gloo.gather_as_the_plain_one()
    elif environment.launcher == "none" and _is_started_by_spawn():
        warnings.warn(
            "mp.spawn started this process, but nothing says how many there are, so it trains by itself. Call "
            "init_process_group with rank and world_size before Accelerator(), or start the script by lockstep "
            "launch.",
            stacklevel=3,
        )
    # Of a group that a script made by itself, all ranks count as ranks of one machine.
    _Process.runtime = Runtime(
        rank=dist.get_rank() if joined else environment.rank,
        world_size=dist.get_world_size() if joined else environment.world_size,
        local_rank=environment.local_rank if environment.distributed or not joined else dist.get_rank(),
        local_world_size=environment.local_world_size
        if environment.distributed or not joined
        else dist.get_world_size(),
        device=device,
        backend=backend,
    )
    return _Process.runtime


def _is_started_by_spawn() -> bool:
    """Return whether a script's own ``torch.multiprocessing.spawn`` started this process, not ``notebook_launcher``."""
    modules = {frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(None)}
    return "torch.multiprocessing.spawn" in modules and "lockstep.launch.functions" not in modules


def forget() -> None:
    """Let the next ``start`` look at the environment anew; the process group, if there is one, stays."""
    _Process.runtime = None


def end_runtime() -> None:
    """Leave the run: destroy the process group if ``start`` made it, and forget the ``Runtime``."""
    functions, _Process.at_end = _Process.at_end, []
    for function in functions:
        function()
    if _Process.made_process_group and dist.is_initialized():
        leave_process_group()
    _Process.runtime = None
    _Process.made_process_group = False
    forget_departures()


def _end_at_exit() -> None:
    end_within(TEARDOWN_LIMIT_S)
    end_runtime()
    end_within(HANDLERS_LIMIT_S)


def leave_process_group() -> None:
    """Destroy torch's default process group, so that neither this nor the end of the process can crash or hang.

    gloo's threads let go of the last collective, its tensors and the group a moment after it is done.
    They abort the process if theirs is the last hold on the group, or if the interpreter is gone by then.
    """
    # Replicas in reference cycles hold the group too. Collected after it, they would end its threads while
    # holding the interpreter's lock, for which one of those may be waiting.
    gc.collect()
    dtensor.forget_meshes()
    group = dist.group.WORLD
    dist.destroy_process_group()
    time.sleep(THREADS_LET_GO_S)
    del group


def _join_process_group(
    environment: ProcessEnvironment, device: torch.device, init: InitProcessGroupKwargs
) -> str | None:
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        if not environment.distributed:
            return None
        shared_memory.register()
        dist.init_process_group(**_init_arguments(environment, device, init))
        _Process.made_process_group = True
        # Sockets closed at interpreter exit in arbitrary order read as a crash on the other ranks.
        atexit.register(_end_at_exit)
    config = dist.get_backend_config()
    return str(config)


def _init_arguments(
    environment: ProcessEnvironment, device: torch.device, init: InitProcessGroupKwargs
) -> Mapping[str, Any]:
    arguments: dict[str, object] = {
        "backend": init.backend or choose_backend(device, named_backend()),
        "rank": environment.rank,
        "world_size": environment.world_size,
    }
    if init.timeout is not None:
        arguments["timeout"] = init.timeout
    if init.init_method is not None:
        arguments["init_method"] = init.init_method
    elif environment.restarts and environment.local_world_size == environment.world_size:
        arguments["store"] = _store_of_round(environment, init.timeout or dist.default_pg_timeout)
    if device.type == "cuda":
        arguments["device_id"] = device
    return arguments


def _store_of_round(environment: ProcessEnvironment, timeout: timedelta) -> c10d.Store:
    """Return a part of the store for each round of one machine: with ``torchrun --master-port`` all rounds meet in
    one store.

    There ranks would find what those before have left, such as their addresses. Machines count rounds by themselves.
    """
    # Not in a torch without distributed.
    from torch.distributed.rendezvous import rendezvous

    found = rendezvous("env://", environment.rank, environment.world_size, timeout=timeout)
    store, _, _ = next(iter(found))
    store.set_timeout(timeout)
    return c10d.PrefixStore(f"round {environment.restarts}", store)


VERSIONS_BYTES = 128
VERSIONED = ("torch", "lockstep")
MOST_RANKS = 8


def check_same_versions(runtime: Runtime) -> None:
    """Compare the versions of all ranks; collective, one message of 128 bytes.

    Raises:
        UsageError: on every rank, if they differ.
    """
    # Without the build (+cpu, +cu126): machines of several kinds may train together.
    mine = "\n".join((str(torch.__version__).partition("+")[0], lockstep.__version__)).encode()[
        :VERSIONS_BYTES
    ]
    sent = torch.zeros(VERSIONS_BYTES, dtype=torch.uint8)
    sent[: len(mine)] = torch.tensor(list(mine), dtype=torch.uint8)
    sent = sent.to(runtime.control_device)
    received = [torch.empty_like(sent) for _ in range(runtime.world_size)]
    dist.all_gather(received, sent)
    texts = torch.stack(received).cpu().tolist()
    found = differences([bytes(text).rstrip(b"\0").decode(errors="replace").split("\n") for text in texts])
    if found:
        raise UsageError(found)


def differences(of_ranks: Sequence[Sequence[str]]) -> str:
    """Return what to say of ranks with other versions than the others; empty where all are equal."""
    for name, versions in zip(VERSIONED, zip(*of_ranks, strict=False), strict=False):
        ranks: dict[str, list[int]] = {}
        for rank, version in enumerate(versions):
            ranks.setdefault(version, []).append(rank)
        if len(ranks) > 1:
            rows = ", ".join(f"{version} on {_ranks(those)}" for version, those in ranks.items())
            return (
                f"The ranks run different versions of {name}: {rows}. Install the same version of {name} in the "
                "environment of each of them."
            )
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {join_names(map(str, ranks), MOST_RANKS)}"


def run_beside_gpu(index: int) -> str:
    """Let this process run only on the cores of the GPU's NUMA node; their numbers, or "" where Linux does not say."""
    gpu: Any = torch.cuda.get_device_properties(index)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
        # -1 where the firmware names no node; every machine has node 0.
        cores = Path(f"/sys/devices/system/node/node{max(0, node)}/cpulist").read_text().strip()
    except (OSError, ValueError):
        return ""
    chosen: set[int] = set()
    for part in cores.split(","):
        first, _, last = part.partition("-")
        chosen.update(range(int(first), int(last or first) + 1))
    os.sched_setaffinity(0, chosen)
    return cores


def apply_affinity(runtime: Runtime) -> None:
    """Run ``run_beside_gpu``, if the process has a GPU; else the main process says that nothing was done."""
    done = runtime.device.type == "cuda" and bool(run_beside_gpu(runtime.device.index or 0))
    if not done and runtime.is_main:
        warnings.warn(
            f"enable_cpu_affinity has no effect: this process computes on {runtime.device}, and the system does "
            "not say which cores are near it.",
            stacklevel=3,
        )
