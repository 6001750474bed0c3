"""Names that scripts import from ``accelerate.utils.environment``."""

from lockstep.utils import clear_environment, patch_environment, str_to_bool

__all__ = ["clear_environment", "patch_environment", "str_to_bool"]
