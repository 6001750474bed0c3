"""Names that scripts import from ``accelerate.optimizer``."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.comm.tree import send_to_device
from lockstep.train.optimizer import PreparedOptimizer
from lockstep.train.optimizer import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer", "PreparedOptimizer", "move_to_device"]


def move_to_device(state: Any, device: torch.device | str | int) -> Any:
    """A state with its tensors, of any shape, on a device."""
    return send_to_device(state, device)
