"""Names that scripts import from ``accelerate.hooks``. Re-exports only."""

from lockstep.offload.dispatch.dispatch import remove_hook_from_submodules
from lockstep.offload.dispatch.model_hook import UserCpuOffloadHook

__all__ = ["UserCpuOffloadHook", "remove_hook_from_submodules"]
