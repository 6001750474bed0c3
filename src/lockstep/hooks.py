"""Names that scripts import from ``accelerate.hooks``. Re-exports only."""

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names
from lockstep.offload.dispatch.align_hooks import (
    AlignDevicesHook,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from lockstep.offload.dispatch.dispatch import remove_hook_from_submodules
from lockstep.offload.dispatch.module_hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
)

if TYPE_CHECKING:
    from lockstep.offload.dispatch.cpu_hooks import CpuOffload, UserCpuOffloadHook
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "CpuOffload": "lockstep.offload.dispatch.cpu_hooks",
            "UserCpuOffloadHook": "lockstep.offload.dispatch.cpu_hooks",
        },
    )

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]
