"""Names that scripts import from ``accelerate.launchers``."""

from lockstep.launch.functions import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
