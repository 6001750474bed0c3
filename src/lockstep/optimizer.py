"""Names that scripts import from ``accelerate.optimizer``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from lockstep.comm.tree import send_to_device
from lockstep.train.optimizer import PreparedOptimizer
from lockstep.train.optimizer import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer", "PreparedOptimizer", "move_to_device", "patch_optimizer_step"]


def move_to_device(state: Any, device: torch.device | str | int) -> Any:
    """A state with its tensors, of any shape, on a device."""
    return send_to_device(state, device)


def patch_optimizer_step(
    accelerated_optimizer: PreparedOptimizer, method: Callable[..., Any]
) -> Callable[..., Any]:
    """``method``, which notes on the prepared optimizer that it was called (``_accelerate_step_called``)."""

    @functools.wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        accelerated_optimizer._accelerate_step_called = True  # type: ignore[attr-defined]
        return method(*args, **kwargs)

    return step
