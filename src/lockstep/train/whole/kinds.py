"""Optimizers that step every element by itself, every parameter by itself, or neither.

It is proved for classes of torch. A class may also say it of itself: then it steps on parts, and is checked.
"""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.comm.dtensor import is_dtensor
from lockstep.comm.tree import Args, Kwargs, map_tensors
from lockstep.errors import UsageError
from lockstep.model.changes import identity_of
from lockstep.offload.optimizer.kernel import SEPARABLE, Separable
from lockstep.torch_internals import dispatch
from lockstep.torch_internals.dispatch import OpOverload, operation_name
from lockstep.torch_internals.optim import is_wrapped_by_scheduler

_CHANGES_NO_STEP = {"__init__", "__repr__", "__str__", "zero_grad", "state_dict", "load_state_dict"}
"""Methods that a subclass may have of its own and still step as its base does."""


def _separable(optimizer: Optimizer) -> Separable | None:
    """Return what is known of the class of torch whose step this optimizer takes; None: it has one of its own."""
    if _replaced_step(optimizer):
        return None
    cls = type(optimizer)
    base = next((one for one in cls.__mro__ if one in SEPARABLE), None)
    if base is None:
        return None
    # Whatever a subclass adds may change the step, unless it is known not to.
    for subclass in cls.__mro__[: cls.__mro__.index(base)]:
        for name, value in vars(subclass).items():
            is_code = callable(value) or isinstance(value, (property, staticmethod, classmethod))
            if is_code and name not in _CHANGES_NO_STEP and not _is_step_of(value, name, base):
                return None
    return SEPARABLE[base]


def _is_step_of(value: Callable[..., object], name: str, base: type[Optimizer]) -> bool:
    """Return whether torch put the hooks of steps around the step that a subclass inherits."""
    return name == "step" and inspect.unwrap(value) is inspect.unwrap(base.step)


def _replaced_step(optimizer: Optimizer) -> bool:
    """Return whether this object has a step of its own; one that a scheduler notes is its class's."""
    own = vars(optimizer).get("step")
    return own is not None and not is_wrapped_by_scheduler(own)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether each element of a parameter is stepped by that of its gradient and state alone.

    It is so of the classes of ``torch.optim`` that are known to, and of subclasses with nothing of their own in a step.
    A class may say it of itself, and is checked then. Of any other class nothing is known.
    """
    if declares_elementwise(optimizer):
        return True
    separable = _separable(optimizer)
    return separable is not None and separable.elementwise


def steps_on_shards(optimizer: Optimizer) -> bool:
    """Return whether the step on shards is that on the whole. DTensor has no rule for what Rprop does to elements."""
    return is_elementwise(optimizer) and not isinstance(optimizer, torch.optim.Rprop)


def is_separable(optimizer: Optimizer) -> bool:
    """Return whether each parameter is stepped by itself. See ``is_elementwise``."""
    return declares_elementwise(optimizer) or _separable(optimizer) is not None


_ALLOWED = {
    *(
        "copy_",
        "clone",
        "detach",
        "alias",
        "fill_",
        "zero_",
        "lift_fresh",
        "is_same_size",
        *dispatch.CONVERSIONS,
    ),
    *("empty_like", "zeros_like", "ones_like", "full_like", "new_zeros", "new_empty", "new_ones", "new_full"),
}
"""What gives each element by itself, besides the operations that torch marks as pointwise."""


def declares_elementwise(optimizer: Optimizer) -> bool:
    """Return whether the class has ``elementwise = True``."""
    return getattr(type(optimizer), "elementwise", False) is True


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse, from now on, that a method of ``optimizer`` does more than element by element: UsageError.

    It costs about 10 µs for each operation. The optimizer stays the object it is; its class becomes a subclass.
    """
    if not getattr(type(optimizer), "_is_checked_elementwise", False):
        # A scheduler's note, or a step in the place of the class's.
        own_step = vars(optimizer).pop("step", None)
        cls = type(optimizer)
        names = {**identity_of(cls), "_is_checked_elementwise": True}
        for name in ("step", *methods_with_parameters(cls)):
            names[name] = _checked(getattr(cls, name))
        optimizer.__class__ = type(cls.__name__, (cls,), names)
        if own_step is not None:
            vars(optimizer)["step"] = _checked(own_step, optimizer)


def _checked(function: Callable[..., object], optimizer: Optimizer | None = None) -> object:
    @functools.wraps(function)
    def method(*args: object, **kwargs: object) -> object:
        this: Any = optimizer if optimizer is not None else args[0]
        if any(map(callable, (*args[1:], *kwargs.values()))):
            raise UsageError(
                f"{type(this).__name__} says elementwise=True, but its step got a closure, which runs the model. "
                "Call step() without a closure, or leave elementwise out: the step then gets whole parameters."
            )
        with _Elementwise(this):
            return function(*args, **kwargs)

    return method


class _Elementwise(dispatch.TorchDispatchMode):
    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self._optimizer = optimizer

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if not _is_elementwise(func) and (_draws(func) or _has_elements((args, kwargs))):
            optimizer = self._optimizer
            raise UsageError(
                f"{type(optimizer).__name__} says elementwise=True, but {func} ({line_of_step(optimizer)}) "
                "combines several elements, and each rank has only a part of them. Leave elementwise out: the "
                "step then gets whole parameters where that is possible, and is refused elsewhere."
            )
        return func(*args, **kwargs)


def _is_elementwise(func: OpOverload) -> bool:
    name = operation_name(func)
    if name.startswith("_foreach_"):
        return name not in dispatch.COMBINING_LISTS
    return (
        name in _ALLOWED
        or name.startswith("_fused_")
        or (torch.Tag.pointwise in func.tags and not _draws(func))
    )


def _draws(func: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _has_elements(tree: object) -> bool:
    """Return whether there is a tensor that a rank may have a part of."""
    found = []
    map_tensors(lambda tensor: found.append(is_dtensor(tensor) or tensor.numel() > 1), tree)
    return any(found)


_PACKAGES = tuple(str(path) for path in (Path(__file__).parents[2], Path(torch.__file__).parent))


def line_of_step(optimizer: Optimizer) -> str:
    """Return "file, line n": the innermost line that runs now outside of torch and this package; or where ``step``
    begins."""
    for frame in reversed(traceback.extract_stack(sys._getframe(1))):
        if not frame.filename.startswith(_PACKAGES):
            return f"{frame.filename}, line {frame.lineno}"
    return place_of(optimizer)


def place_of(optimizer: Optimizer) -> str:
    """Return "file, line n" of an optimizer's ``step``."""
    step = inspect.unwrap(type(optimizer).step)
    code = getattr(step, "__code__", None)
    return "an unknown file" if code is None else f"{code.co_filename}, line {code.co_firstlineno}"


_LEFT_ALONE = {"zero_grad", "state_dict", "load_state_dict", "add_param_group"}
_PARAMETERS = {"params", "state", "step"}
"""``group["params"]``, ``self.state``, and ``step`` of another optimizer."""


def methods_with_parameters(cls: type[Optimizer]) -> list[str]:
    """Return names of the public methods of a class, beyond those of every optimizer, that may read or write
    parameters.

    A method that touches none is left out: it may be called on one rank alone, to log what it returns.
    """
    own: dict[str, object] = {}
    # The base first, so that of a method that is overridden the last one counts.
    for base in reversed(cls.__mro__[: cls.__mro__.index(Optimizer)]):
        own.update(vars(base))
    functions = {
        name: inspect.unwrap(value) for name, value in own.items() if isinstance(value, FunctionType)
    }
    touching: set[str] = set()
    words = {name: set(_names_in_code(function.__code__)) for name, function in functions.items()}
    # Until no method is added that calls one which touches parameters.
    while True:
        found = {name for name in words if words[name] & (_PARAMETERS | touching)}
        if found == touching:
            break
        touching = found
    return sorted(
        name for name in touching if not name.startswith("_") and name not in _LEFT_ALONE and name != "step"
    )


def _names_in_code(code: CodeType) -> Iterator[str]:
    """Return the names and strings in a function and in those that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_in_code(constant)
        elif isinstance(constant, (tuple, frozenset)):
            yield from (word for word in constant if isinstance(word, str))
