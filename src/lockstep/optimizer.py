"""Names that scripts import from ``accelerate.optimizer``."""

from __future__ import annotations

from lockstep.train.optimizer import PreparedOptimizer
from lockstep.train.optimizer import PreparedOptimizer as AcceleratedOptimizer

__all__ = [
    "AcceleratedOptimizer",
    "PreparedOptimizer",
]
