"""Names that scripts import from ``accelerate.utils.imports``."""

from lockstep.runtime.available import *  # noqa: F403  (is_<package>_available)
