"""What a launch will do, decided before anything starts: flags > environment > file > default."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config import readers
from lockstep.config.batch import BatchSizes
from lockstep.config.checks import LOCAL, MAX_THREADS, check_topology
from lockstep.config.rules import Said, combine
from lockstep.config.said import (
    joined_sources,
    precision_of,
    said_by_settings,
    sources_of,
    spread_of,
)
from lockstep.config.sources import SETTINGS, variable_of
from lockstep.config.values import parse_integer
from lockstep.config.world import fitted
from lockstep.errors import ConfigError
from lockstep.launch.machines import (
    Reach,
    check_counted,
    machines_of,
    reach_of,
)
from lockstep.launch.machines import Setting as Setting
from lockstep.launch.machines import Settings as Settings

ELASTIC_RESTARTS = 1000

DEFAULTS: dict[str, Any] = {
    "num_processes": None,
    "num_machines": 1,
    "min_machines": None,
    "machine_rank": None,
    "main_process_ip": None,
    "main_process_port": None,
    "rdzv_backend": "static",
    "interface": None,
    "secret_file": None,
    "hosts": None,
    "hostfile": None,
    "include_hosts": None,
    "exclude_hosts": None,
    "slurm": None,
    "slurm_options": None,
    "mpi": None,
    "ray": None,
    "k8s": None,
    "k8s_options": None,
    "forward_env": None,
    "max_restarts": None,
    "hang_timeout": 300.0,
    "grace": 30.0,
    "watch": True,
    "mixed_precision": None,
    "use_cpu": None,
    "gpu_ids": None,
    "debug": None,
    "gradient_accumulation_steps": None,
    "parallel": None,
    "gradient_clipping": None,
    "micro_batch_size": None,
    "optimizer": None,
    "scheduler": None,
    "grad_scaler": None,
    "deepspeed_config_file": None,
    "dynamo_backend": None,
    "num_cpu_threads_per_process": None,
}

# settings that travel to the workers in the environment, under the name that they have there
WORKER_NAMES = {
    "mixed_precision": "mixed_precision",
    "use_cpu": "cpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "parallel": "parallel",
    "gradient_clipping": "gradient_clipping",
    "micro_batch_size": "micro_batch_size",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "grad_scaler": "grad_scaler",
    "deepspeed_config_file": "deepspeed_config_file",
    "dynamo_backend": "dynamo_backend",
    "watch": "watch",
    "grace": "grace",
}

SECTIONS = ("optimizer", "scheduler", "grad_scaler")  # they travel as JSON


@dataclass(frozen=True)
class Program:
    """What each worker runs: a script, a module (``-m``), or any command (``no_python``).

    ``elsewhere``: it is looked for where it runs, not here.
    """

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    elsewhere: bool = False

    def command(self) -> tuple[str, ...]:
        """The argument vector of a worker. Raises ConfigError when the script is not there."""
        if self.module and self.no_python:
            raise ConfigError("--module and --no-python exclude each other. Drop one of them.")
        if not self.target.strip():
            raise ConfigError(f"The script is {self.target[:40]!r}. Name a script, a module or a program.")
        if self.no_python:
            return (self.target, *self.arguments)
        if self.module:
            return (sys.executable, "-m", self.target, *self.arguments)
        if self.elsewhere and self.target.isprintable() and Path(self.target).name:
            return (sys.executable, self.target, *self.arguments)
        try:
            kind = (
                "missing"
                if not Path(self.target).exists()
                else "directory"
                if _is_package(self.target)
                else ""
            )
        except (OSError, ValueError):  # a name too long for the file system, or with a NUL
            kind = "missing"
        if kind:
            what = "does not exist" if kind == "missing" else "is a directory without __main__.py"
            raise ConfigError(
                f"the script {self.target[:200]!r} {what}. Check the path, or use -m for a module or --no-python "
                f"for another program."
            )
        return (sys.executable, self.target, *self.arguments)


def _is_package(target: str) -> bool:
    path = Path(target)
    return path.is_dir() and not (path / "__main__.py").exists()


@dataclass(frozen=True)
class Survival:
    """What happens when something fails, hangs or is to stop.

    ``max_restarts``: rounds after a failure. ``hang_timeout_s``: how long a hang that was named may last.
    ``grace_s``: from a stop signal to SIGKILL. ``watch``: whether workers are watched at all.
    """

    max_restarts: int = 0
    hang_timeout_s: float = 300.0
    grace_s: float = 30.0
    watch: bool = True


@dataclass(frozen=True)
class LaunchPlan:
    """One machine's part of a launch, or what one launch starts on all machines.

    ``environment`` is what the workers get beside the launcher's own. ``num_machines`` is the most that take
    part; ``machine_rank`` None: machines are numbered as they arrive. ``address`` and ``port``: where they meet.
    """

    command: tuple[str, ...]
    nproc: int
    num_machines: int = 1
    min_machines: int = 1
    machine_rank: int | None = None
    address: str | None = None
    port: int | None = None
    rdzv_backend: str = "static"
    interface: str | None = None
    secret_file: str | None = None
    survival: Survival = field(default_factory=Survival)
    reach: Reach = field(default_factory=Reach)
    environment: Mapping[str, str] = field(default_factory=dict)
    log_dir: str | None = None
    tee: bool = False
    settings: Mapping[str, Setting] = field(default_factory=dict)

    @property
    def elastic(self) -> bool:
        """Whether machines may leave and join."""
        return self.min_machines < self.num_machines


def merge(flags: Mapping[str, Setting], file: Mapping[str, Setting], environ: Mapping[str, str]) -> Settings:
    """Settings by precedence, each with its origin.

    Raises:
        ConfigError: two of them contradict each other, or an environment variable is malformed.
    """
    merged: Settings = {}
    for name, default in DEFAULTS.items():
        said = flags.get(name) or _from_environment(name, environ) or file.get(name)
        merged[name] = said or Setting(default, "default")
    if "num_machines" in flags and "min_machines" not in flags:  # --nnodes says both
        merged["min_machines"] = Setting(None, flags["num_machines"].origin)
    try:
        merged |= machines_of(merged, flags.get("nproc"), environ)
        if "nproc" in flags:  # for each machine, where num_processes is the total
            total = flags["nproc"].value * merged["num_machines"].value
            merged["num_processes"] = Setting(total, flags["nproc"].origin)
        check_topology({name: setting.value for name, setting in merged.items()})
        check_counted(merged)
    except ConfigError as error:
        first = str(error).split(" ", 1)[0]
        origin = merged[first].origin if first in merged else "default"
        raise ConfigError(
            str(error) if origin == "default" else f"{error} ({first} is from {origin})"
        ) from None
    return merged


def _from_environment(name: str, environ: Mapping[str, str]) -> Setting | None:
    if name == "num_cpu_threads_per_process":
        text = environ.get("OMP_NUM_THREADS")
        if not text:
            return None
        threads = parse_integer(text, "OMP_NUM_THREADS", 1, MAX_THREADS)
        return Setting(threads, "environment variable OMP_NUM_THREADS")
    if name not in WORKER_NAMES:
        return None
    variable = variable_of(WORKER_NAMES[name], environ)
    if variable is None:
        return None
    value = SETTINGS[WORKER_NAMES[name]].parse(environ[variable], variable)
    if value is not None and name in (*SECTIONS, "parallel"):
        value = environ[variable]
    return Setting(value, f"environment variable {variable}")


def make_plan(
    program: Program,
    settings: Mapping[str, Setting],
    device_count: int,
    cores: int,
    log_dir: str | None = None,
    tee: bool = False,
    described: Mapping[str, Said] | None = None,
    output: str | None = None,
) -> LaunchPlan:
    """Turn merged settings into a plan; ``device_count`` GPUs and ``cores`` are what this machine has.

    ``described`` is what the settings' DeepSpeed configuration says; workers read that file themselves.
    ``output`` is a file for what the backend writes.

    Raises:
        ConfigError: the script is missing, more GPUs are named than there are, or ``parallel`` or the batch
            sizes do not fit the number of processes.
    """
    value = {name: setting.value for name, setting in settings.items()}
    shown = dict(settings)
    reach = reach_of(value, output)
    machines = value["num_machines"]
    least = value["min_machines"] or machines
    total = value["num_processes"]
    if total is None:
        devices = device_count if value["gpu_ids"] in (None, "all") else len(value["gpu_ids"].split(","))
        total = 1 if value["use_cpu"] else max(1, devices)
        shown["num_processes"] = Setting(total, "default: one for each GPU, else 1")
    nproc = total // machines
    says = check_spread(settings, described or {}, [nproc * count for count in range(least, machines + 1)])
    if described:
        shown |= described_settings(says, nproc * machines)
    if tee and log_dir is None:
        raise ConfigError("--tee shows what goes to log files, but there is no --log-dir. Give one.")
    if log_dir is not None and reach.backend == LOCAL:
        _check_folder(log_dir)
    if output is not None and reach.backend != "k8s":
        raise ConfigError("--output is for the manifests of --k8s. Add --k8s, or remove --output.")
    threads = value["num_cpu_threads_per_process"]
    if threads is None and reach.backend == LOCAL:  # other machines count their own cores
        threads = max(1, cores // nproc)
        shown["num_cpu_threads_per_process"] = Setting(
            threads, f"default: {cores} cores over {nproc} processes"
        )
    restarts = value["max_restarts"]
    if restarts is None:
        restarts = ELASTIC_RESTARTS if least < machines else 0
        why = "machines may leave and join" if least < machines else "a failure ends the run"
        shown["max_restarts"] = Setting(restarts, f"default: {why}")
    return LaunchPlan(
        command=program.command(),
        nproc=nproc,
        num_machines=machines,
        min_machines=least,
        machine_rank=value["machine_rank"],
        address=value["main_process_ip"],
        port=value["main_process_port"],
        rdzv_backend=value["rdzv_backend"],
        interface=value["interface"],
        secret_file=value["secret_file"],
        survival=Survival(restarts, value["hang_timeout"], value["grace"], value["watch"]),
        reach=reach,
        environment=_worker_environment(settings, threads),
        log_dir=log_dir,
        tee=tee,
        settings=shown,
    )


def _check_folder(log_dir: str) -> None:
    """Raise ConfigError when a file stands where the folder of log files is to be."""
    file = next((path for path in (Path(log_dir), *Path(log_dir).parents) if os.path.isfile(path)), None)
    if file is not None:
        raise ConfigError(
            f"--log-dir {log_dir[:200]} cannot be a folder: {str(file)[:200]} is a file. Name another."
        )


def _worker_environment(settings: Mapping[str, Setting], threads: Any) -> dict[str, str]:
    """The settings that the workers read from their environment: only what was said."""
    value = {
        name: None if setting.origin == "default" else setting.value for name, setting in settings.items()
    }
    environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    for name, worker_name in WORKER_NAMES.items():
        if value[name] is not None:
            environment[SETTINGS[worker_name].names[0]] = _as_text(name, value[name])
    if value["gpu_ids"] not in (None, "all"):
        environment["CUDA_VISIBLE_DEVICES"] = str(value["gpu_ids"])
    if value["debug"]:
        environment["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    return environment


def _as_text(name: str, value: Any) -> str:
    """A setting as a worker reads it from its environment."""
    if isinstance(value, bool):
        return str(value).lower()
    if name == "deepspeed_config_file":
        return str(Path(value).absolute())
    return json.dumps(value) if isinstance(value, dict) else str(value)


def check_spread(
    settings: Mapping[str, Setting], described: Mapping[str, Said], sizes: Sequence[int]
) -> dict[str, Said]:
    """Whether ``parallel``, batch sizes and a DeepSpeed configuration agree, and fit each number of processes.

    Returns what they say together.

    Raises:
        ConfigError: they do not; the message has the values.
    """
    own = {name: (item.value, item.origin) for name, item in settings.items()}
    for name in SECTIONS:
        value, origin = own.get(name, (None, ""))
        if value is not None:
            own[name] = (SETTINGS[name].parse(value, name), origin)
    words = settings["parallel"].words
    said = said_by_settings(own)
    said |= {name: Said(said[name].value, source) for name, source in words.items() if name in said}
    says = combine(described, said)
    spread, batch = spread_of(says), BatchSizes.of(says)
    for processes in sizes:
        fitted(spread, batch, processes)
    return says


def described_settings(says: Mapping[str, Said], processes: int) -> dict[str, Setting]:
    """What a DeepSpeed configuration and the other settings add up to, each with where it is said."""
    found: dict[str, Setting] = {}
    words = sources_of(says)
    if words:
        found["parallel"] = Setting(str(spread_of(says)), joined_sources(words), words)
    precision = precision_of(says)
    said = says.get(precision) or says.get("fp16") or says.get("bf16")
    if said is not None:
        found["mixed_precision"] = Setting(precision, said.source)
    batch = BatchSizes.of(says)
    solved = fitted(spread_of(says), batch, processes)
    follows = f"follows from {', '.join(batch.sources)} for {processes} processes"
    for name, value in (
        ("train_batch_size", solved.train),
        ("micro_batch_size", solved.micro),
        ("gradient_accumulation_steps", solved.accumulation),
    ):
        if value is not None:
            found[name] = Setting(value, says[name].source if name in says else follows)
    for name in ("gradient_clipping", "optimizer", "scheduler"):
        if name in says:
            said = says[name]
            described = hasattr(said.value, "params")
            found[name] = Setting(asdict(said.value) if described else said.value, said.source)
    scaler = {name: says[name] for name in readers.SCALER_FIELDS if name in says}
    if scaler and precision != "bf16":  # with which gradients are not scaled
        values = {name: item.value for name, item in scaler.items()}
        sources = {name: item.source for name, item in scaler.items()}
        found["grad_scaler"] = Setting(values, joined_sources(sources))
    return found


def available_cores() -> int:
    """Cores that this process may use, which under a scheduler are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe(plan: LaunchPlan) -> Sequence[tuple[str, str, str]]:
    """Rows (name, value, origin) of a plan's settings, for ``--dry-run``."""
    return [
        (name, str(setting.value), setting.origin)
        for name, setting in plan.settings.items()
        if setting.value is not None
    ]
