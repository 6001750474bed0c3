"""The order in which a model is made ready: the one file that knows every strategy.

device → autocast → compile → spread over the processes
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.config.enums import Strategy
from lockstep.config.handlers import AutocastKwargs, DistributedDataParallelKwargs
from lockstep.config.parallel import Parallel
from lockstep.parallel.autocast import autocast_forward, remove_autocast
from lockstep.parallel.replicate import data_parallel, distributed_data_parallel
from lockstep.runtime.process import Runtime


@dataclass(frozen=True)
class ModelOptions:
    """What ``spread`` does to a model."""

    parallel: Parallel = field(default_factory=Parallel)
    mixed_precision: str = "no"
    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    compile_options: dict[str, Any] | None = None


def spread(
    model: nn.Module,
    runtime: Runtime,
    options: ModelOptions,
    device_placement: bool = True,
    evaluation_mode: bool = False,
) -> nn.Module:
    """The model that the training loop calls. ``unwrap`` gives back the user's own object.

    With ``evaluation_mode`` the model is not replicated with gradients: each rank just calls it.
    """
    if device_placement:
        model = model.to(runtime.device)
    model = autocast_forward(model, options.mixed_precision, runtime.device, options.autocast)
    if options.compile_options is not None:
        model = torch.compile(model, **options.compile_options)  # type: ignore[assignment]
    if evaluation_mode:
        return model
    if options.parallel.strategy is Strategy.DATA_PARALLEL:
        return data_parallel(model, runtime)
    if runtime.world_size > 1:
        return distributed_data_parallel(model, runtime, options.ddp)
    return model


def unwrap(model: nn.Module, keep_autocast: bool = True, keep_compile: bool = True) -> nn.Module:
    """The user's own model inside what ``spread`` returned."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    inner: nn.Module = getattr(model, "_orig_mod", model)  # of what torch.compile returns
    if not keep_autocast:
        remove_autocast(inner)
    return model if keep_compile else inner


def is_compiled_module(module: nn.Module) -> bool:
    """Whether ``torch.compile`` returned this module."""
    return hasattr(module, "_orig_mod")


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """``unwrap`` under the name and arguments that scripts know."""
    return unwrap(model, keep_autocast=keep_fp32_wrapper, keep_compile=keep_torch_compile)
