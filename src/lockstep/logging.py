"""Names that scripts import from ``accelerate.logging``."""

from lockstep.observe.log import MultiProcessAdapter, get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]
