"""Where settings come from: code > environment (which carries flags and file) > default.

The only reader of ``os.environ`` in the package. Imports neither torch nor pydantic, because every
worker reads this first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config import readers
from lockstep.config.enums import PrecisionType
from lockstep.config.json_file import parse_json
from lockstep.config.parallel import Parallel
from lockstep.config.training_objects import OptimizerConfig, SchedulerConfig
from lockstep.config.values import parse_bool as parse_bool
from lockstep.config.values import parse_integer as parse_integer
from lockstep.config.values import parse_precision as parse_precision
from lockstep.config.values import suggestion as suggestion
from lockstep.errors import ConfigError

Environ = Mapping[str, str]


@dataclass(frozen=True)
class ProcessEnvironment:
    """Where a launcher says that this process stands.

    ``distributed`` is True when a launcher described a process group, even a group of one.
    ``master_addr`` and ``master_port`` are None in a plain ``python train.py``.
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


class Launcher(NamedTuple):
    """The variables in which one kind of launcher tells a process its place."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    node_rank: str


TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")

# Slurm: SLURM_STEP_* exist only inside srun; SLURM_NTASKS also in batch scripts, which are one process.
OTHER_LAUNCHERS = (
    Launcher(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_NODE_RANK_UNUSED",  # Open MPI's NODE_RANK is the rank inside the node, not the node's
    ),
    Launcher(
        "MVAPICH's mpirun",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        "MV2_COMM_WORLD_NODE_RANK_UNUSED",
    ),
    Launcher(
        "MPICH's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_NODE_UNUSED"
    ),
    Launcher(
        "Slurm's srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_NODEID",
    ),
)


def process_environment(environ: Environ | None = None, need_rendezvous: bool = True) -> ProcessEnvironment:
    """The place of this process, from the variables of torchrun, mpirun or srun; without them a world of one.

    ``need_rendezvous=False`` accepts a missing MASTER_ADDR, for callers with an ``init_method`` of their own.

    Raises:
        ConfigError: variables are malformed or contradict each other, or there are several processes
            and no address at which they can meet.
    """
    environ = os.environ if environ is None else environ
    launcher = _detect(environ)
    if launcher is None:
        return ProcessEnvironment()
    world_size = _integer(environ, launcher.world_size, at_least=1)
    rank = _integer(environ, launcher.rank, at_least=0)
    if world_size is None or (rank is None and world_size > 1):
        have, lack = (launcher.rank, launcher.world_size) if world_size is None else launcher[2:0:-1]
        raise ConfigError(
            f"{have}={environ[have]} is set but {lack} is missing, so this process does not know its place. "
            f"Start the script with `lockstep launch`, or set both, or unset {have}."
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
    local_rank, local_world_size = _local_place(environ, launcher, rank, world_size, address)
    node_rank = _integer(environ, launcher.node_rank, at_least=0)
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
    )


def _detect(environ: Environ) -> Launcher | None:
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return TORCHRUN
    for launcher in OTHER_LAUNCHERS:
        if environ.get(launcher.rank) and environ.get(launcher.world_size):
            return launcher
    return None


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
    return environ.get("MASTER_ADDR") or None, _integer(environ, "MASTER_PORT", at_least=0, at_most=65535)


def _local_place(
    environ: Environ, launcher: Launcher, rank: int, world_size: int, address: str | None
) -> tuple[int, int]:
    """(local rank, local world size); where nothing is said, all are here if they meet on the loopback."""
    local_rank = _integer(environ, launcher.local_rank, at_least=0)
    local_size_text = environ.get(launcher.local_world_size, "")
    # srun's SLURM_NTASKS_PER_NODE may be absent or a list such as "2(x3),1"; only a number is of use
    if launcher is not TORCHRUN and not local_size_text.isdigit():
        local_size = None
    else:
        local_size = _integer(environ, launcher.local_world_size, at_least=1, at_most=world_size)
    here = address is None or address in ("localhost", "::1") or address.startswith("127.")
    if local_size is None:
        local_size = world_size if here else (local_rank or 0) + 1
    if local_rank is None:
        local_rank = rank % local_size
    if local_rank >= local_size:
        raise ConfigError(
            f"{launcher.local_rank}={local_rank} with {launcher.local_world_size}={local_size}: local ranks count "
            f"from 0 to local world size - 1. Correct the two variables."
        )
    return local_rank, local_size


def _integer(environ: Environ, name: str, at_least: int, at_most: int | None = None) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    return parse_integer(text, name, at_least, at_most)


# -- settings of a worker ----------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerSettings:
    """What an ``Accelerator`` in a worker needs; ``origins[name]`` says where each value came from."""

    mixed_precision: PrecisionType = PrecisionType.NO
    cpu: bool = False
    gradient_accumulation_steps: int = 1
    parallel: Parallel | None = None
    gradient_clipping: float | None = None
    micro_batch_size: int | None = None
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    grad_scaler: Mapping[str, float] | None = None
    deepspeed_config_file: str | None = None
    dynamo_backend: str = "no"
    origins: Mapping[str, str] = field(default_factory=dict)


class SettingSource(NamedTuple):
    """One setting: its environment names, first wins, and how its value is read (value, origin)."""

    names: tuple[str, ...]
    parse: Callable[[Any, str], Any]


def worker_settings(code: Mapping[str, Any] | None = None, environ: Environ | None = None) -> WorkerSettings:
    """Merge what the script says (``code``; None means not said) with the environment and the defaults.

    Raises:
        ConfigError: a value is not allowed, or ``code`` has a name that is not a setting.
    """
    environ = os.environ if environ is None else environ
    code = code or {}
    for name in code:
        if name not in SETTINGS:
            raise ConfigError(f"{name!r} is not a setting of a worker.{suggestion(name, SETTINGS)}")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, source in SETTINGS.items():
        if code.get(name) is not None:
            values[name], origins[name] = source.parse(code[name], f"Accelerator({name}=...)"), "code"
            continue
        for variable in source.names:
            if environ.get(variable):
                values[name] = source.parse(environ[variable], variable)
                origins[name] = f"environment variable {variable}"
                break
        else:
            origins[name] = "default"
    return WorkerSettings(**values, origins=origins)


def _parse_steps(value: Any, origin: str) -> int:
    return parse_integer(value, origin, at_least=1)


def _parse_path(value: Any, _origin: str) -> str | None:
    return None if value == "none" else str(value)  # Accelerate writes none


def _parse_parallel(value: Any, origin: str) -> Parallel:
    try:
        return Parallel.parse(value)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def _parse_clipping(value: Any, origin: str) -> float | None:
    return None if value in ("auto", "none") else readers.number(value, origin)


def _section(read: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """A section, which the environment has as JSON."""
    return lambda value, origin: read(parse_json(value, origin) if isinstance(value, str) else value, origin)


def _parse_backend(value: Any, _origin: str) -> str:
    return str(value).lower()


SETTINGS: dict[str, SettingSource] = {
    "mixed_precision": SettingSource(
        ("LOCKSTEP_MIXED_PRECISION", "ACCELERATE_MIXED_PRECISION"), parse_precision
    ),
    "cpu": SettingSource(("LOCKSTEP_USE_CPU", "ACCELERATE_USE_CPU"), parse_bool),
    "gradient_accumulation_steps": SettingSource(
        ("LOCKSTEP_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"), _parse_steps
    ),
    "parallel": SettingSource(("LOCKSTEP_PARALLEL",), _parse_parallel),
    "gradient_clipping": SettingSource(
        ("LOCKSTEP_GRADIENT_CLIPPING", "ACCELERATE_GRADIENT_CLIPPING"), _parse_clipping
    ),
    "micro_batch_size": SettingSource(("LOCKSTEP_MICRO_BATCH_SIZE",), _parse_steps),
    "optimizer": SettingSource(("LOCKSTEP_OPTIMIZER",), _section(readers.optimizer)),
    "scheduler": SettingSource(("LOCKSTEP_SCHEDULER",), _section(readers.scheduler)),
    "grad_scaler": SettingSource(("LOCKSTEP_GRAD_SCALER",), _section(readers.grad_scaler)),
    "deepspeed_config_file": SettingSource(
        ("LOCKSTEP_DEEPSPEED_CONFIG_FILE", "ACCELERATE_DEEPSPEED_CONFIG_FILE"), _parse_path
    ),
    "dynamo_backend": SettingSource(("LOCKSTEP_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_BACKEND"), _parse_backend),
}


# what `accelerate launch` tells its workers, by the names of its file
DEEPSPEED_VARIABLES = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "zero3_init_flag",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "zero3_save_16bit_model",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "deepspeed_moe_layer_cls_names",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
}
FSDP_VARIABLES = {"transformer_cls_to_wrap": "transformer_layer_cls_to_wrap"}


def accelerate_sections(environ: Environ | None = None) -> dict[str, dict[str, str]]:
    """The sections ``fsdp_config`` and ``deepspeed_config`` that ``accelerate launch`` put into the environment."""
    environ = os.environ if environ is None else environ
    sections: dict[str, dict[str, str]] = {}
    if environ.get("ACCELERATE_USE_FSDP") and parse_bool(
        environ["ACCELERATE_USE_FSDP"], "ACCELERATE_USE_FSDP"
    ):
        words = {name[5:].lower(): value for name, value in environ.items() if name.startswith("FSDP_")}
        # it always sets both, and the version says which one counts
        words.pop("sharding_strategy" if words.get("version") == "2" else "reshard_after_forward", None)
        sections["fsdp_config"] = {FSDP_VARIABLES.get(name, name): value for name, value in words.items()}
    name = "ACCELERATE_USE_DEEPSPEED"
    if environ.get(name) and parse_bool(environ[name], name):
        sections["deepspeed_config"] = {
            key: environ[variable] for variable, key in DEEPSPEED_VARIABLES.items() if environ.get(variable)
        }
        if sections["deepspeed_config"].get("deepspeed_config_file", "none") != "none":
            sections["deepspeed_config"].pop("zero_stage", None)  # the file says it
    return sections


# -- other reads of the environment --------------------------------------------------------------------


def error_file(environ: Environ | None = None) -> str | None:
    """The file in which the elastic agent expects this worker's error, if there is an agent."""
    return (os.environ if environ is None else environ).get("TORCHELASTIC_ERROR_FILE") or None


def user_config_file(environ: Environ | None = None) -> Path:
    """Where `lockstep config` writes: LOCKSTEP_CONFIG_FILE, or config.yaml in the user's configuration folder."""
    environ = os.environ if environ is None else environ
    if environ.get("LOCKSTEP_CONFIG_FILE"):
        return Path(environ["LOCKSTEP_CONFIG_FILE"]).expanduser()
    base = environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path("~/.config").expanduser()) / "lockstep" / "config.yaml"


def inherited_environment() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def export_environment(values: Mapping[str, str]) -> None:
    """Set variables for this process and the processes that it starts."""
    os.environ.update(values)


def restore_environment(values: Mapping[str, str]) -> None:
    """Make this process's environment equal to an earlier copy."""
    for name in set(os.environ) - set(values):
        del os.environ[name]
    os.environ.update(values)
