"""Names that scripts import from ``accelerate.hooks``. Re-exports only."""

from lockstep.placement.dispatch import remove_hook_from_submodules
from lockstep.placement.model_hook import UserCpuOffloadHook

__all__ = ["UserCpuOffloadHook", "remove_hook_from_submodules"]
