"""The place of a process in its run, from the variables that launchers set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.config.checks import MAX_PORT, MAX_PROCESSES
from lockstep.config.values import parse_host, parse_integer, plain
from lockstep.errors import ConfigError

Environ = Mapping[str, str]


@dataclass(frozen=True)
class ProcessEnvironment:
    """Where a launcher says that this process stands.

    ``distributed`` is True when a launcher described a process group, even a group of one.
    ``master_addr`` and ``master_port`` are None in a plain ``python train.py``. ``restarts`` counts the rounds before.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    distributed: bool = False
    launcher: str = "none"
    restarts: int = 0


class Launcher(NamedTuple):
    """The variables in which one kind of launcher tells a process its place; "": it has none such.

    ``mark`` is set by this launcher and by none that comes later. ``local_world_size`` may be a list of all nodes, as
    Slurm writes it; ``nodes`` is how many there are.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    node_rank: str = ""
    mark: str = ""
    nodes: str = ""


TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")

# The first one counts whose variables are set: srun --mpi=pmi2 sets those of PMI as well, and mpirun inside of a job
# of Slurm leaves those of the step by which it came to a node. docs/launching.md says what was seen where.
OTHER_LAUNCHERS = (
    Launcher(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "LSF's jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
    Launcher(
        "MVAPICH's mpirun",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "MPICH's mpiexec",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        mark="MPI_LOCALRANKID",
    ),
    # These exist only inside of srun; SLURM_NTASKS also in batch scripts, which are one process.
    Launcher(
        "Slurm's srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_NODEID",
    ),
    Launcher(
        "Flux",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        "FLUX_TASK_LOCAL_ID",
        "",
        nodes="FLUX_JOB_NNODES",
    ),
    Launcher(
        "Cray's PALS",
        "PMI_RANK",
        "PMI_SIZE",
        "PALS_LOCAL_RANKID",
        "PMI_LOCAL_SIZE",
        "PALS_NODEID",
        mark="PALS_LOCAL_RANKID",
    ),
    Launcher("PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)


def place_in(environ: Environ, need_rendezvous: bool = True) -> ProcessEnvironment:
    """Return the place of this process, from the variables of torchrun, mpirun or srun; without them a world of one.

    ``need_rendezvous=False`` accepts a missing MASTER_ADDR, for callers with an ``init_method`` of their own.

    Raises:
        ConfigError: variables are malformed or contradict each other, or there are several processes
            and no address at which they can meet.
    """
    launcher = _detect(environ)
    if environ.get("PMIX_RANK") and (launcher is None or _is_under_prterun(environ, launcher)):
        raise ConfigError(
            f"PMIX_RANK={plain(environ['PMIX_RANK'])} is set, but no variable says how many processes there are "
            "(prterun sets none). Start the script by mpirun, srun or `lockstep launch`, or export RANK and WORLD_SIZE."
        )
    if launcher is None:
        return ProcessEnvironment()
    world_size = _integer(environ, launcher.world_size, at_least=1, at_most=MAX_PROCESSES)
    rank = _integer(environ, launcher.rank, at_least=0)
    if world_size is None or (rank is None and world_size > 1):
        have, lack = (launcher.rank, launcher.world_size) if world_size is None else launcher[2:0:-1]
        raise ConfigError(
            f"{have}={environ[have]} is set but {lack} is missing, so this process does not know its rank among "
            f"the others. Start the script with `lockstep launch`, or set both, or unset {have}."
        )
    rank = rank or 0
    if rank >= world_size:
        raise ConfigError(
            f"{launcher.rank}={rank} with {launcher.world_size}={world_size}: ranks count from 0 to world size "
            f"- 1. Start the script with `lockstep launch`, or correct the two variables."
        )
    if world_size == 1 and not _has_rendezvous(environ):
        return ProcessEnvironment(launcher=launcher.name)
    address, port = _rendezvous(environ, launcher, world_size, need_rendezvous)
    node_rank = _integer(environ, launcher.node_rank, at_least=0)
    local_rank, local_world_size = _local_place(environ, launcher, rank, world_size, node_rank, address)
    return ProcessEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size if node_rank is None else node_rank,
        master_addr=address,
        master_port=port,
        distributed=True,
        launcher=launcher.name,
        restarts=_integer(environ, "TORCHELASTIC_RESTART_COUNT", at_least=0) or 0,
    )


def _detect(environ: Environ) -> Launcher | None:
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return TORCHRUN
    for launcher in OTHER_LAUNCHERS:
        told = (launcher.rank, launcher.world_size, launcher.mark or launcher.rank)
        if all(environ.get(name) for name in told):
            return launcher
    return None


def _is_under_prterun(environ: Environ, launcher: Launcher) -> bool:
    """Return whether this looks like a task of Slurm only because prterun came to the node by one, of another rank."""
    return launcher.rank == "SLURM_PROCID" and environ.get("PMIX_NAMESPACE", "").startswith("prterun")


def _has_rendezvous(environ: Environ) -> bool:
    return bool(environ.get("MASTER_ADDR")) and bool(environ.get("MASTER_PORT"))


def _rendezvous(
    environ: Environ, launcher: Launcher, world_size: int, needed: bool
) -> tuple[str | None, int | None]:
    if needed and not _has_rendezvous(environ):
        names = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        lacking = " and ".join(names) + (" is" if len(names) == 1 else " are")
        raise ConfigError(
            f"{launcher.name} started {world_size} processes ({launcher.world_size}={world_size}), but {lacking} "
            f"missing, so they cannot meet. Export MASTER_ADDR (the host of rank 0) and MASTER_PORT (a free port "
            f"there), or for independent runs export WORLD_SIZE=1."
        )
    return _host(environ), _integer(environ, "MASTER_PORT", at_least=0, at_most=MAX_PORT)


def _host(environ: Environ) -> str | None:
    address = environ.get("MASTER_ADDR") or None
    if address is None:
        return None
    try:
        parse_host(address.partition("%")[0])  # after % is the interface of a link-local address
    except ConfigError:
        raise ConfigError(
            f"MASTER_ADDR={plain(address)} is not a host name or IP address. Set it to the machine with rank 0."
        ) from None
    return address


def _local_place(
    environ: Environ,
    launcher: Launcher,
    rank: int,
    world_size: int,
    node_rank: int | None,
    address: str | None,
) -> tuple[int, int]:
    """Return (local rank, local world size); where nothing is said, all are here if they meet on the loopback."""
    local_rank = _integer(environ, launcher.local_rank, at_least=0)
    local_size = _local_world_size(environ, launcher, world_size, node_rank)
    here = address is None or address in ("localhost", "::1") or address.startswith("127.")
    if local_rank is None and launcher is not TORCHRUN and not here:
        raise ConfigError(
            f"{launcher.name} started this process as rank {rank} of {world_size}, but no variable says which of its "
            "machine it is. Start the script with `lockstep launch`, or export RANK, WORLD_SIZE, LOCAL_RANK and "
            "LOCAL_WORLD_SIZE."
        )
    if local_size is None:
        # On another machine, this rank and the local ranks before it are all that is certain.
        local_size = world_size if here else min((local_rank or 0) + 1, world_size)
    if local_rank is None:
        local_rank = rank % local_size
    if local_rank >= local_size:
        raise ConfigError(
            f"{launcher.local_rank}={local_rank} with {launcher.local_world_size}={local_size}: local ranks count "
            f"from 0 to local world size - 1. Correct the two variables."
        )
    return local_rank, local_size


def _local_world_size(
    environ: Environ, launcher: Launcher, world_size: int, node_rank: int | None
) -> int | None:
    if node_rank is not None:
        tasks = _tasks_of_node(environ.get(launcher.local_world_size, ""), node_rank)
        if tasks is not None:
            return tasks
    nodes = _integer(environ, launcher.nodes, at_least=1)
    if nodes is not None and world_size % nodes == 0:
        return world_size // nodes
    return _integer(environ, launcher.local_world_size, at_least=1, at_most=world_size)


def _tasks_of_node(text: str, node_rank: int) -> int | None:
    """Return the number of a node in a list as Slurm's "4(x2),3", which says 4, 4 and 3; None: it is no such list."""
    if text.isdigit():
        return None
    last = -1
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part)
        if found is None:
            return None
        last += int(found[2] or 1)
        if node_rank <= last:
            return int(found[1])
    return None


def _integer(environ: Environ, name: str, at_least: int, at_most: int | None = None) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    return parse_integer(text, name, at_least, at_most)
