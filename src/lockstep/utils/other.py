"""Names that scripts import from ``accelerate.utils.other``."""

from lockstep.utils import (
    clear_environment,
    extract_model_from_parallel,
    is_compiled_module,
    load,
    patch_environment,
    save,
    wait_for_everyone,
)

__all__ = [
    "clear_environment",
    "extract_model_from_parallel",
    "is_compiled_module",
    "load",
    "patch_environment",
    "save",
    "wait_for_everyone",
]
