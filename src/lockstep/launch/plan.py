"""What a launch will do, decided before anything starts: flags > environment > file > default."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.config import kinds
from lockstep.config.checks import ELASTIC_RESTARTS, LOCAL, ValuesByName, check_topology
from lockstep.config.settings import OF_WORKERS, SETTINGS, THREADS_VARIABLE, Setting
from lockstep.config.sources import given_by_environment
from lockstep.config.values import SettingValue
from lockstep.errors import ConfigError
from lockstep.launch.machines import SettingValues as SettingValues
from lockstep.launch.machines import Transport, check_counted, machines_of, transport_of
from lockstep.launch.membership import HEARTBEAT_LIMIT_S, JOIN_LIMIT_S, LAST_CALL_S
from lockstep.launch.spread import check_spread, described_settings

ALIAS = "lockstep.compat.accelerate"
"""The module that runs a script for which ``import accelerate`` means this library."""
TEXTS = (kinds.PARALLEL, kinds.OPTIMIZER, kinds.SCHEDULER, kinds.GRAD_SCALER)
"""Kinds of values that travel on as the environment has them."""


MISSING = "does not exist. Check the path, or use -m for a module or --no-python for another program."


@dataclass(frozen=True)
class Program:
    """What each worker runs: a script, a module (``-m``), or any command (``no_python``).

    ``elsewhere``: it is looked for where it runs, not here. ``as_accelerate``: for it, ``import accelerate`` means this
    library.
    """

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    elsewhere: bool = False
    as_accelerate: bool = False

    def command(self) -> tuple[str, ...]:
        """Return the argument vector of a worker. Raises ConfigError when the script is not there."""
        if self.module and self.no_python:
            raise ConfigError("--module and --no-python exclude each other. Drop one of them.")
        if not self.target.strip():
            raise ConfigError(
                f"{self.target[:40]!r} is not the name of a script. Name a script, a module or a program."
            )
        if self.as_accelerate and self.no_python:
            raise ConfigError("--as-accelerate and --no-python exclude each other. Drop one of them.")
        if self.no_python:
            return (self.target, *self.arguments)
        python = (sys.executable, *(("-m", ALIAS) if self.as_accelerate else ()))
        if self.module:
            return (*python, "-m", self.target, *self.arguments)
        if self.elsewhere and self.target.isprintable() and Path(self.target).name:
            return (*python, self.target, *self.arguments)
        try:
            problem = _problem(Path(self.target))
        except (OSError, ValueError):
            # A name too long for the file system, or with a NUL.
            problem = MISSING
        if problem:
            raise ConfigError(f"the script {self.target[:200]!r} {problem}")
        return (*python, self.target, *self.arguments)


def _problem(script: Path) -> str:
    """Return why Python cannot run this file or folder; "": it can."""
    if not script.exists():
        return MISSING
    if script.is_dir() and not (script / "__main__.py").exists():
        return "is a directory without __main__.py. Check the path, or use -m for a module."
    if script.suffix in (".yaml", ".yml", ".json"):
        return f"is a configuration file. Write --config-file {str(script)[:200]} SCRIPT."
    hides = script.name in ("lockstep.py", "torch.py")
    return f"hides the package {script.stem}, which it imports. Rename it." if hides else ""


@dataclass(frozen=True)
class FaultPolicy:
    """What happens when something fails, hangs or is to stop.

    ``max_restarts``: rounds after a failure. ``hang_timeout_s``: how long a hang that was named may last.
    ``grace_s``: from a stop signal to SIGKILL. ``watch``: whether workers are watched at all. ``monitor_interval_s``:
    between two looks at whether they run. ``join_timeout_s``: how long machines wait for each other, and
    ``last_call_s``: for more of them once there are enough. ``heartbeat_limit_s``: how long machines may be silent.
    ``warm_restarts``: whether workers are forks of a process that has imported torch.
    """

    max_restarts: int = 0
    hang_timeout_s: float = SETTINGS["hang_timeout"].default
    grace_s: float = SETTINGS["grace"].default
    watch: bool = SETTINGS["watch"].default
    monitor_interval_s: float = SETTINGS["monitor_interval"].default
    join_timeout_s: float = JOIN_LIMIT_S
    last_call_s: float = LAST_CALL_S
    heartbeat_limit_s: float = HEARTBEAT_LIMIT_S
    warm_restarts: bool = SETTINGS["warm_restarts"].default


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
    interface: str | None = None
    secret_file: str | None = None
    fault_policy: FaultPolicy = field(default_factory=FaultPolicy)
    transport: Transport = field(default_factory=Transport)
    environment: Mapping[str, str] = field(default_factory=dict)
    role: str = SETTINGS["role"].default
    log_dir: str | None = None
    tee: bool = False
    quiet: bool = False
    settings: Mapping[str, SettingValue] = field(default_factory=dict)

    @property
    def elastic(self) -> bool:
        """Whether machines may leave and join."""
        return self.min_machines < self.num_machines


def merge(
    flags: Mapping[str, SettingValue], file: Mapping[str, SettingValue], environ: Mapping[str, str]
) -> SettingValues:
    """Return settings by precedence, each with its origin.

    Raises:
        ConfigError: two of them contradict each other, or an environment variable is malformed.
    """
    merged: SettingValues = {}
    for name, setting in SETTINGS.items():
        given = flags.get(name) or _from_environment(setting, environ) or file.get(name)
        default = setting.default if setting.is_for_launcher else None
        merged[name] = given or SettingValue(default, "default")
    # --nnodes says the least and the most.
    if "num_machines" in flags and "min_machines" not in flags:
        merged["min_machines"] = SettingValue(None, flags["num_machines"].source)
    try:
        merged |= machines_of(merged, flags.get("nproc"), environ)
        # nproc is for each machine, num_processes the total.
        if "nproc" in flags:
            total = flags["nproc"].value * merged["num_machines"].value
            merged["num_processes"] = SettingValue(total, flags["nproc"].source)
        check_topology({name: setting.value for name, setting in merged.items()})
        check_counted(merged)
    except ConfigError as error:
        # Messages begin with the name of the setting that is wrong.
        first = str(error).split(" ", 1)[0]
        origin = merged[first].source if first in merged else "default"
        if origin.startswith("flag "):
            raise ConfigError(_in_flags(str(error), merged)) from None
        raise ConfigError(
            str(error) if origin == "default" else f"{error} ({first} is from {origin})"
        ) from None
    return merged


def _in_flags(sentence: str, settings: SettingValues) -> str:
    """Return the sentence with flags for the names of settings, except of those that a file or a variable sets."""
    typed = {
        name for name, one in settings.items() if one.source == "default" or one.source.startswith("flag ")
    }
    return re.sub(
        r"(?<![\w-])\w+(?!\w)",
        lambda word: (
            SETTINGS[word[0]].flag
            if "_" in word[0] and word[0] in typed and SETTINGS[word[0]].flags
            else word[0]
        ),
        sentence,
    )


def _from_environment(setting: Setting, environ: Mapping[str, str]) -> SettingValue | None:
    given = given_by_environment(setting, environ)
    if given is not None and setting.kind in TEXTS and given.value is not None:
        variable = given.source.rpartition(" ")[2]
        return given._replace(value=environ[variable])
    return given


def make_plan(
    program: Program,
    settings: Mapping[str, SettingValue],
    device_count: int,
    cores: int,
    log_dir: str | None = None,
    tee: bool = False,
    described: Mapping[str, SettingValue] | None = None,
    output: str | None = None,
    quiet: bool = False,
) -> LaunchPlan:
    """Turn merged settings into a plan; ``device_count`` GPUs and ``cores`` are what this machine has.

    ``described`` is what the settings' DeepSpeed configuration says; workers read that file themselves.
    ``output`` is a file for what the backend writes. ``quiet``: no line of progress is shown.

    Raises:
        ConfigError: the script is missing, more GPUs are named than there are, or ``parallel`` or the batch
            sizes do not fit the number of processes.
    """
    value = {name: setting.value for name, setting in settings.items()}
    transport = transport_of(value, output)
    defaults = _defaults(value, transport.backend, device_count, cores)
    value |= {name: setting.value for name, setting in defaults.items()}
    machines = value["num_machines"]
    least = value["min_machines"] or machines
    nproc = value["num_processes"] // machines
    asked = check_spread(settings, described or {}, [nproc * count for count in range(least, machines + 1)])
    _check_outputs(transport.backend, log_dir, tee, output)
    shown = {**settings, **defaults}
    if described:
        shown |= described_settings(asked, nproc * machines)
    return LaunchPlan(
        command=program.command(),
        nproc=nproc,
        num_machines=machines,
        min_machines=least,
        machine_rank=value["machine_rank"],
        address=value["main_process_ip"],
        port=value["main_process_port"],
        interface=value["interface"],
        secret_file=value["secret_file"],
        fault_policy=_fault_policy(value),
        transport=transport,
        environment=_worker_environment(
            settings, value["num_cpu_threads_per_process"], program.as_accelerate
        ),
        role=value["role"],
        log_dir=log_dir,
        tee=tee,
        quiet=quiet,
        settings=shown,
    )


def _defaults(value: ValuesByName, backend: str, device_count: int, cores: int) -> SettingValues:
    """Return what was not said and follows from this machine or from other settings, each with its reason."""
    found: SettingValues = {}
    machines = value["num_machines"]
    total = value["num_processes"]
    if total is None:
        devices = device_count if value["gpu_ids"] in (None, "all") else len(value["gpu_ids"].split(","))
        total = 1 if value["use_cpu"] else max(1, devices)
        found["num_processes"] = SettingValue(total, "default: one for each GPU, else 1")
    # Other machines count their own cores.
    if value["num_cpu_threads_per_process"] is None and backend == LOCAL:
        nproc = total // machines
        found["num_cpu_threads_per_process"] = SettingValue(
            max(1, cores // nproc), f"default: {cores} cores over {nproc} processes"
        )
    if value["max_restarts"] is None:
        is_elastic = (value["min_machines"] or machines) < machines
        why = "machines may leave and join" if is_elastic else "a failure ends the run"
        found["max_restarts"] = SettingValue(ELASTIC_RESTARTS if is_elastic else 0, f"default: {why}")
    return found


def _check_outputs(backend: str, log_dir: str | None, tee: bool, output: str | None) -> None:
    """Raise ConfigError when log files or manifests could not be where they are wanted."""
    if tee and log_dir is None:
        raise ConfigError(
            "--tee also shows the output that goes to log files, but there is no --log-dir. Give --log-dir."
        )
    if log_dir is not None and backend == LOCAL:
        _check_folder(log_dir)
    if output is not None and backend != "k8s":
        raise ConfigError(
            "--output names the file for the manifests of --k8s, but --k8s is missing. Add --k8s, or remove "
            "--output."
        )


def _fault_policy(value: ValuesByName) -> FaultPolicy:
    policy = FaultPolicy(
        value["max_restarts"],
        value["hang_timeout"],
        value["grace"],
        value["watch"],
        value["monitor_interval"],
    )
    waits = value["rdzv_conf"] or {}
    return replace(
        policy,
        join_timeout_s=waits.get("join_timeout", policy.join_timeout_s),
        last_call_s=waits.get("last_call_timeout", policy.last_call_s),
        heartbeat_limit_s=waits.get("heartbeat_timeout", policy.heartbeat_limit_s),
        warm_restarts=value["warm_restarts"],
    )


def _check_folder(log_dir: str) -> None:
    """Raise ConfigError when a file stands where the folder of log files is to be."""
    file = next((path for path in (Path(log_dir), *Path(log_dir).parents) if os.path.isfile(path)), None)
    if file is not None:
        raise ConfigError(
            f"--log-dir {log_dir[:200]} cannot be a folder: {str(file)[:200]} is a file. Name another."
        )


def _worker_environment(
    settings: Mapping[str, SettingValue], threads: object, as_accelerate: bool
) -> dict[str, str]:
    """Return the settings that the workers read from their environment: only what was said.

    ``as_accelerate``: under Accelerate's names as well, which ``transformers.TrainingArguments`` reads by itself and
    then passes on as its own wish.
    """
    value = {
        name: None if setting.source == "default" else setting.value for name, setting in settings.items()
    }
    environment = {} if threads is None else {THREADS_VARIABLE: str(threads)}
    for setting in OF_WORKERS.values():
        if value[setting.name] is not None:
            for variable in setting.variables if as_accelerate else setting.variables[:1]:
                environment[variable] = _as_text(setting.name, value[setting.name])
    if value["gpu_ids"] not in (None, "all"):
        environment["CUDA_VISIBLE_DEVICES"] = str(value["gpu_ids"])
    if value["debug"]:
        environment["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    return environment


def _as_text(name: str, value: Any) -> str:
    """Return a setting as a worker reads it from its environment."""
    if isinstance(value, bool):
        return str(value).lower()
    if name == "deepspeed_config_file":
        return str(Path(value).absolute())
    return json.dumps(value) if isinstance(value, dict) else str(value)


def available_cores() -> int:
    """Cores that this process may use, which under a scheduler are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_plan(plan: LaunchPlan) -> Sequence[tuple[str, str, str]]:
    """Rows (name, value, origin) of a plan's settings, for ``--dry-run``."""
    return [
        (name, str(setting.value), setting.source)
        for name, setting in plan.settings.items()
        if setting.value is not None
    ]
