"""Names that scripts import from ``accelerate.optimizer``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from lockstep.comm.tree import Tree, send_to_device
from lockstep.train.optimizer import PreparedOptimizer
from lockstep.train.optimizer import PreparedOptimizer as AcceleratedOptimizer

T = TypeVar("T")

__all__ = ["AcceleratedOptimizer", "PreparedOptimizer", "move_to_device", "patch_optimizer_step"]


def move_to_device(state: Tree, device: torch.device | str | int) -> Tree:
    """Return the state of an optimizer with its tensors on a device.

    Args:
        state: Nested lists, tuples and mappings with tensors of any shape.
        device: The device.

    Examples:
        ```python
        import torch
        from lockstep.optimizer import move_to_device

        state = move_to_device({"momentum": torch.zeros(4), "step": 3}, "cpu")
        assert state["momentum"].device == torch.device("cpu") and state["step"] == 3
        ```
    """
    return send_to_device(state, device)


def patch_optimizer_step(
    accelerated_optimizer: PreparedOptimizer, method: Callable[..., T]
) -> Callable[..., T]:
    """Return a function like ``method`` that also sets ``_accelerate_step_called`` of a prepared optimizer when it is
    called.

    Args:
        accelerated_optimizer: The prepared optimizer.
        method: The function, such as the ``step`` of the optimizer inside.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.optimizer import patch_optimizer_step

        accelerator = Accelerator()
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        step = patch_optimizer_step(optimizer, optimizer.optimizer.step)
        step()
        assert optimizer._accelerate_step_called
        ```
    """

    @functools.wraps(method)
    def step(*args: object, **kwargs: object) -> T:
        accelerated_optimizer._accelerate_step_called = True  # type: ignore[attr-defined]
        return method(*args, **kwargs)

    return step
