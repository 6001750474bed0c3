"""Lockstep: train PyTorch models on many devices. One script, any scale, the same numbers.

Public names are resolved at first use, so that importing the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "1.0.0"

_MODULE_OF = {
    "Accelerator": "lockstep.accelerator",
    "AutocastKwargs": "lockstep.config.handlers",
    "BoundedStaleness": "lockstep.parallel.asynchronous.stale",
    "CheckpointError": "lockstep.errors",
    "cpu_offload": "lockstep.offload.dispatch.dispatch",
    "cpu_offload_with_hook": "lockstep.offload.dispatch.cpu_hooks",
    "DamageChecks": "lockstep.config.handlers",
    "DamageError": "lockstep.errors",
    "DataLoaderConfiguration": "lockstep.config.handlers",
    "DDPCommunicationHookType": "lockstep.config.enums",
    "debug_launcher": "lockstep.launch.functions",
    "DiLoCo": "lockstep.parallel.asynchronous.diloco",
    "disk_offload": "lockstep.offload.dispatch.dispatch",
    "dispatch_model": "lockstep.offload.dispatch.dispatch",
    "DistributedDataParallelKwargs": "lockstep.config.handlers",
    "DistributedType": "lockstep.config.enums",
    "find_executable_batch_size": "lockstep.runtime.memory",
    "get_logger": "lockstep.observe.log",
    "GradientAccumulationPlugin": "lockstep.config.handlers",
    "GradScalerKwargs": "lockstep.config.handlers",
    "infer_auto_device_map": "lockstep.offload.device_map.infer",
    "init_empty_weights": "lockstep.offload.dispatch.empty",
    "init_on_device": "lockstep.offload.dispatch.empty",
    "InitProcessGroupKwargs": "lockstep.config.handlers",
    "load_checkpoint_and_dispatch": "lockstep.offload.dispatch.dispatch",
    "LocalSGD": "lockstep.parallel.asynchronous.local_sgd",
    "NoCheckpointError": "lockstep.errors",
    "notebook_launcher": "lockstep.launch.functions",
    "OffloadError": "lockstep.errors",
    "PartialState": "lockstep.runtime.run_state",
    "ProfileKwargs": "lockstep.config.handlers",
    "ProjectConfiguration": "lockstep.config.handlers",
    "set_seed": "lockstep.runtime.seed",
    "skip_first_batches": "lockstep.data.skip",
    "SpikeError": "lockstep.errors",
    "SpikePolicy": "lockstep.config.spikes",
    "synchronize_rng_states": "lockstep.runtime.seed",
    "tqdm": "lockstep.observe.log",
}

# Scripts write ``lockstep.utils.set_seed`` after a plain ``import lockstep``.
_MODULES = (
    "big_modeling",
    "data_loader",
    "hooks",
    "inference",
    "launchers",
    "local_sgd",
    "logging",
    "nn",
    "optimizer",
    "scheduler",
    "state",
    "tracking",
    "utils",
)

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"lockstep.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'lockstep' has no attribute '{name}'")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_MODULES})
