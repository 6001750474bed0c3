"""Which line of an optimizer is at work."""

from __future__ import annotations

import inspect
import sys
import traceback
from pathlib import Path

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
