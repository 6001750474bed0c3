"""The versions that a checkpoint names."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version

import numpy
import torch


@cache
def versions() -> dict[str, str]:
    """Of Lockstep, torch, NumPy and Python."""
    return {
        "lockstep": version("lockstep-train"),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }
