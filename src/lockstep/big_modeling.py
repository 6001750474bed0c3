"""Names that scripts import from ``accelerate.big_modeling``. Re-exports only."""

from lockstep.offload.dispatch.cpu_hooks import cpu_offload_with_hook
from lockstep.offload.dispatch.dispatch import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)
from lockstep.offload.dispatch.empty import init_empty_weights, init_on_device

__all__ = [
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
]
