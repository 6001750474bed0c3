"""Names that scripts import from ``accelerate.scheduler``."""

from lockstep.train.scheduler import PreparedScheduler
from lockstep.train.scheduler import PreparedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler", "PreparedScheduler"]
