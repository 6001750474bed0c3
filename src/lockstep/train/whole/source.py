"""What an optimizer's own code tells: which line is at work, and which methods touch parameters."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

_PACKAGES = tuple(str(path) for path in (Path(__file__).parents[2], Path(torch.__file__).parent))


def line_of_step(optimizer: Optimizer) -> str:
    """ "file, line n": the innermost line that runs now outside of torch and this package; or where ``step`` begins."""
    for frame in reversed(traceback.extract_stack(sys._getframe(1))):
        if not frame.filename.startswith(_PACKAGES):
            return f"{frame.filename}, line {frame.lineno}"
    return place_of(optimizer)


def place_of(optimizer: Optimizer) -> str:
    """ "file, line n" of an optimizer's ``step``."""
    step = inspect.unwrap(type(optimizer).step)
    code = getattr(step, "__code__", None)
    return "an unknown file" if code is None else f"{code.co_filename}, line {code.co_firstlineno}"


_LEFT_ALONE = {"zero_grad", "state_dict", "load_state_dict", "add_param_group"}
_PARAMETERS = {"params", "state", "step"}
"""``group["params"]``, ``self.state``, and ``step`` of another optimizer."""


def methods_with_parameters(cls: type[Optimizer]) -> list[str]:
    """Names of the public methods of a class, beyond those of every optimizer, that may read or write parameters.

    A method that touches none is left out: it may be called on one rank alone, to log what it returns.
    """
    own: dict[str, Any] = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(Optimizer)]):
        own.update(vars(base))
    functions = {
        name: inspect.unwrap(value) for name, value in own.items() if isinstance(value, FunctionType)
    }
    touching: set[str] = set()
    words = {name: set(_words(function.__code__)) for name, function in functions.items()}
    while True:
        found = {name for name in words if words[name] & (_PARAMETERS | touching)}
        if found == touching:
            break
        touching = found
    return sorted(
        name for name in touching if not name.startswith("_") and name not in _LEFT_ALONE and name != "step"
    )


def _words(code: CodeType) -> Iterator[str]:
    """The names and strings in a function and in those that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _words(constant)
        elif isinstance(constant, (tuple, frozenset)):
            yield from (word for word in constant if isinstance(word, str))
