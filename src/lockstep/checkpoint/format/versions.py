"""The versions that a checkpoint names."""

from __future__ import annotations

import platform
from functools import cache

import numpy
import torch

from lockstep import __version__


@cache
def versions() -> dict[str, str]:
    """Of Lockstep, torch, NumPy and Python."""
    return {
        "lockstep": __version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }
