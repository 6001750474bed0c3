"""Names that scripts import from ``accelerate.state``. Views of what exists; they hold nothing."""

from __future__ import annotations

from typing import Any

from lockstep.accelerator import Accelerator
from lockstep.config.enums import DistributedType
from lockstep.errors import UsageError
from lockstep.runtime.control import PartialState, RunState
from lockstep.runtime.step import StepState

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState", "is_initialized"]


class AcceleratorState(RunState):
    """The state of the latest ``Accelerator``.

    Raises:
        UsageError: no ``Accelerator`` exists yet.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(_latest("AcceleratorState").mixed_precision)


def GradientState(**kwargs: Any) -> StepState:
    """The ``StepState`` of the latest ``Accelerator``; UsageError if there is none."""
    return _latest("GradientState").gradient_state


def is_initialized() -> bool:
    """Whether there is an ``Accelerator`` whose state can be shown."""
    return Accelerator.latest() is not None


def _latest(name: str) -> Accelerator:
    accelerator = Accelerator.latest()
    if accelerator is None:
        raise UsageError(
            f"{name} shows the state of an Accelerator, and none exists yet. Make the Accelerator first."
        )
    return accelerator
