"""What is proved of an optimizer: that it steps every element by itself, every parameter by itself, or neither."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.offload.optimizer.separable import SEPARABLE, Separable
from lockstep.torch_internals.optim import is_wrapped_by_scheduler
from lockstep.train.whole.elementwise import declares_elementwise

_CHANGES_NO_STEP = {"__init__", "__repr__", "__str__", "zero_grad", "state_dict", "load_state_dict"}
"""Methods that a subclass may have of its own and still step as its base does."""


def _separable(optimizer: Optimizer) -> Separable | None:
    """What is known of the class of torch whose step this optimizer takes; None: it has one of its own."""
    if _replaced_step(optimizer):
        return None
    cls = type(optimizer)
    base = next((one for one in cls.__mro__ if one in SEPARABLE), None)
    if base is None:
        return None
    for subclass in cls.__mro__[: cls.__mro__.index(base)]:
        for name, value in vars(subclass).items():
            is_code = callable(value) or isinstance(value, (property, staticmethod, classmethod))
            if is_code and name not in _CHANGES_NO_STEP and not _is_step_of(value, name, base):
                return None
    return SEPARABLE[base]


def _is_step_of(value: Any, name: str, base: type[Optimizer]) -> bool:
    """Whether torch put the hooks of steps around the step that a subclass inherits."""
    return name == "step" and inspect.unwrap(value) is inspect.unwrap(base.step)


def _replaced_step(optimizer: Optimizer) -> bool:
    """Whether this object has a step of its own; one that a scheduler notes is its class's."""
    own = vars(optimizer).get("step")
    return own is not None and not is_wrapped_by_scheduler(own)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether each element of a parameter is stepped by that of its gradient and state alone.

    It is so of the classes of ``torch.optim`` that are known to, and of subclasses with nothing of their own in a step.
    A class may say it of itself, and is checked then. Of any other class nothing is known.
    """
    if declares_elementwise(optimizer):
        return True
    separable = _separable(optimizer)
    return separable is not None and separable.elementwise


def steps_on_shards(optimizer: Optimizer) -> bool:
    """Whether the step on shards is that on the whole. DTensor has no rule for what Rprop does to elements."""
    return is_elementwise(optimizer) and not isinstance(optimizer, torch.optim.Rprop)


def is_separable(optimizer: Optimizer) -> bool:
    """Whether each parameter is stepped by itself. See ``is_elementwise``."""
    return declares_elementwise(optimizer) or _separable(optimizer) is not None
