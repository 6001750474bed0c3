"""Names that scripts import from ``accelerate.state``. Views of what exists; they hold nothing."""

from __future__ import annotations

from typing import Any

from lockstep.accelerator import Accelerator
from lockstep.config.enums import DistributedType
from lockstep.errors import ArgumentError
from lockstep.runtime.run_state import PartialState, RunState
from lockstep.runtime.step import StepState

__all__ = [
    "AcceleratorState",
    "DistributedType",
    "GradientState",
    "PartialState",
    "is_initialized",
]


class _SharedByLatest:
    """What the states of the latest ``Accelerator`` show, as a mapping; empty where there is none."""

    def __get__(self, instance: object, owner: type) -> dict[str, object]:
        latest = Accelerator.latest()
        if latest is None:
            return {}
        state = latest.state
        return {
            **PartialState._shared_state,
            **{key: value for key, value in vars(state).items() if key[0] != "_"},
        }


class _OfRuns(type):
    """``isinstance`` counts what an ``Accelerator`` has as its state."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, RunState)


class AcceleratorState(RunState, metaclass=_OfRuns):
    """The state of the latest ``Accelerator``: rank, device, precision, plugins and so on.

    In Accelerate it is the place in which a run's state is kept. Here it shows ``accelerator.state``, and keeps
    nothing.

    Args:
        mixed_precision: If it is given, it must be that of the ``Accelerator``.
        cpu: Ignored.
        kwargs: Ignored.

    Raises:
        ValueError: no ``Accelerator`` exists yet, or it has another precision.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.state import AcceleratorState

        accelerator = Accelerator(mixed_precision="bf16")
        assert AcceleratorState().mixed_precision == "bf16"
        ```
    """

    _shared_state = _SharedByLatest()

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **kwargs: object) -> None:
        latest = Accelerator.latest()
        if latest is None:
            raise ArgumentError(
                "AcceleratorState shows the state of an Accelerator, and none exists yet. Make the Accelerator first."
            )
        state = latest.state
        if mixed_precision is not None and mixed_precision != state.mixed_precision:
            raise ArgumentError(
                f"AcceleratorState(mixed_precision={mixed_precision!r}) was requested, but the Accelerator was "
                f"made with {state.mixed_precision!r}. Pass mixed_precision to Accelerator, or leave it out here."
            )
        self.__dict__.update(vars(state))

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget which ``Accelerator`` was the latest; with ``reset_partial_state`` this process's place as well."""
        Accelerator.forget_all()
        if reset_partial_state:
            PartialState._reset_state()


class _OfLatest(type):
    """Calls give the ``StepState`` of the latest ``Accelerator``, and each of these is an instance."""

    def __call__(cls, gradient_accumulation_plugin: Any = None) -> StepState:
        latest = Accelerator.latest()
        state = StepState() if latest is None else latest.gradient_state
        if gradient_accumulation_plugin is not None:
            for name, value in gradient_accumulation_plugin.to_kwargs().items():
                setattr(state, {"num_steps": "accumulation_steps"}.get(name, name), value)
        return state

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, StepState)


class GradientState(metaclass=_OfLatest):
    """The state of accumulation, from the latest ``Accelerator``: calls return its ``StepState``.

    Without an ``Accelerator``, a call returns a new ``StepState``.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.state import GradientState

        accelerator = Accelerator(gradient_accumulation_steps=4)
        assert GradientState() is accelerator.gradient_state
        ```
    """

    _shared_state = _SharedByLatest()

    @staticmethod
    def _reset_state() -> None:
        """Nothing is kept here: the state belongs to its ``Accelerator``."""


def is_initialized() -> bool:
    """Return whether an ``Accelerator`` exists, so that ``AcceleratorState`` can show its state.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.state import is_initialized

        accelerator = Accelerator()
        assert is_initialized()
        ```
    """
    return Accelerator.latest() is not None
