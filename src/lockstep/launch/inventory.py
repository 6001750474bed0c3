"""What this machine and installation have, as plain facts, and what is wrong with the environment."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import sys
from collections.abc import Callable

from lockstep import __version__
from lockstep.compat.settings import check_named_file, environment_settings
from lockstep.config.place import Environ
from lockstep.config.settings import OF_WORKERS
from lockstep.config.sources import (
    control_endpoint,
    given_by_environment,
    inherited_environment,
    process_environment,
    unknown_variables,
    user_config_file,
)
from lockstep.distribution import DISTRIBUTION
from lockstep.errors import ConfigError
from lockstep.launch.backend import is_secret
from lockstep.launch.plan import available_cores

PACKAGES = ("torch", "numpy", "safetensors", "torchdata", "transformers", "datasets")
# An allow-list: anything else may hold a secret.
VARIABLE_PREFIXES = ("LOCKSTEP_", "NCCL_", "GLOO_", "OMP_", "TORCH_DISTRIBUTED_", "TORCH_NCCL_")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def gather_inventory(with_torch: bool = True) -> dict[str, str]:
    """Return a mapping of names to values, in the order in which to show them. Imports torch only if asked."""
    facts = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores available": str(available_cores()),
        "memory": _memory(),
    }
    facts[DISTRIBUTION] = __version__
    for package in PACKAGES:
        facts[package] = _version(package)
    for program in ("nvidia-smi", "srun", "mpirun"):
        facts[program] = shutil.which(program) or "not found"
    if with_torch:
        facts.update(_torch_facts())
    config = user_config_file()
    facts["default configuration"] = str(config) if config.is_file() else f"{config} (none)"
    for name, value in sorted(inherited_environment().items()):
        if name.startswith(VARIABLE_PREFIXES) or name in VARIABLES:
            facts[f"${name}"] = "<secret>" if is_secret(name) else value
    for number, sentence in enumerate(problems_of_environment(), start=1):
        facts[f"problem {number}"] = sentence
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _memory() -> str:
    try:
        with open("/proc/meminfo") as file:
            kib = int(file.readline().split()[1])
    except (OSError, ValueError, IndexError):
        return "unknown"
    return f"{kib / 2**20:.1f} GiB"


def _torch_facts() -> dict[str, str]:
    import torch
    import torch.distributed as dist

    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name)]
    facts = {
        "torch's CUDA": str(torch.version.cuda),
        "GPUs": str(torch.cuda.device_count()),
        "process group backends": ", ".join(backends) or "none",
        "torch threads": str(torch.get_num_threads()),
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        facts[f"GPU {index}"] = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
    return facts


def problems_of_environment(environ: Environ | None = None) -> list[str]:
    """Return a sentence for each variable that a run would refuse or ignore; a run stops at the first."""
    environ = inherited_environment() if environ is None else environ

    checks: list[Callable[[], object]] = [
        *(lambda one=one: given_by_environment(one, environ) for one in OF_WORKERS.values()),
        lambda: check_named_file(environ),
        lambda: process_environment(environ),
        lambda: control_endpoint(environ),
        lambda: environment_settings(environ, machines=1),
    ]
    found = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found.append(str(error))
    return [*found, *unknown_variables(environ)]
