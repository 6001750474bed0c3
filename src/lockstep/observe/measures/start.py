"""What is said of a run when it begins: its world, its configuration with the source of each value, its environment."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch

import lockstep
from lockstep.config.options import Options
from lockstep.config.sources import telling_variables
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.runtime.process import Runtime


def describe(runtime: Runtime, options: Options, models: Sequence[ParallelModel]) -> dict[str, object]:
    """Return the values of the event ``start``; what is not known is None."""
    return {
        "world_size": runtime.world_size,
        "nodes": -(-runtime.world_size // runtime.local_world_size),
        "device": device_name(runtime.device),
        "versions": {
            "torch": str(torch.__version__),
            "lockstep": lockstep.__version__,
            "python": platform.python_version(),
        },
        "environment": telling_variables(),
        "configuration": [
            {"name": name, "value": setting.value, "source": setting.source}
            for name, setting in options.given.items()
        ],
        "parallel": str(options.parallel),
        "mixed_precision": str(options.mixed_precision),
        "parameters": parameters_of(models),
        "seed": torch.initial_seed(),
    }


def device_name(device: torch.device) -> str:
    """Return the name of the device, such as "cpu" or "NVIDIA H100 80GB HBM3"."""
    name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return str(name(device)) if name is not None and device.type != "cpu" else device.type


def parameters_of(models: Sequence[ParallelModel]) -> int | None:
    """Return parameters of the whole models, tied ones once; None where other ranks hold some of them."""
    if not models or not all(model.holds_all_parameters for model in models):
        return None
    return sum(parameter.numel() for model in models for parameter in model.parameters())
