"""What is needed of the front that trains, and which models can be trained asynchronously."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.comm.dtensor import is_dtensor
from lockstep.errors import ConfigError, UsageError
from lockstep.runtime.process import Runtime
from lockstep.torch_internals.fsdp2 import is_sharded


class Trainer(Protocol):
    """The part of an ``Accelerator`` that is used here."""

    sync_gradients: bool

    @property
    def runtime(self) -> Runtime: ...

    @property
    def mixed_precision(self) -> str: ...

    @property
    def scaler(self) -> torch.amp.GradScaler | None: ...

    def alone(self, model: nn.Module) -> AbstractContextManager[None]: ...


def check_count(what: str, name: str, value: Any, least: int) -> None:
    """Raise ConfigError unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what} got {name}={value!r}. Pass a whole number of {least} or more.")


def check_replicas(what: str, trainer: Trainer, model: Any) -> None:
    """Raise UsageError unless every rank holds a replica of the whole model, as in plain data parallel training."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"{what} got a {type(model).__name__}. Pass the model that prepare() returned.")
    world_size, kind = trainer.runtime.world_size, type(model).__name__
    refused = f"Prepare it with parallel='ddp', or leave {what} out."
    if is_sharded(model):
        raise UsageError(
            f"{what} needs the whole model on every rank, but {kind} is sharded by ZeRO. {refused}"
        )
    if any(is_dtensor(parameter) for parameter in model.parameters()):
        raise UsageError(
            f"{what} needs the whole model on every rank, but {kind} is split over ranks. {refused}"
        )
    # Only the front knows of ranks that share a model's work although each holds all of its weights.
    parallel = getattr(trainer, "parallel", None)
    split = [
        f"{axis}={size}" for axis in ("tp", "pp", "cp", "ep") if (size := getattr(parallel, axis, 1)) > 1
    ]
    if split and world_size > 1:
        raise UsageError(
            f"{what} needs ranks that train by themselves, but parallel='{' '.join(split)}' makes them share each "
            f"step. {refused}"
        )
    if any(parameter.is_complex() for parameter in model.parameters()):
        raise UsageError(
            f"{what} averages real numbers, but {kind} has complex parameters. Leave {what} out."
        )
    if world_size == 1:
        return
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        raise UsageError(
            f"{what} got a {kind} that is no replica of data parallel training. Pass what prepare() returned for it; "
            "it must have parameters that require gradients."
        )
    ranks = model.process_group.size()
    if ranks != world_size:
        raise UsageError(
            f"{what} needs a replica on every rank, but {kind} has {ranks} among {world_size} ranks. {refused}"
        )
