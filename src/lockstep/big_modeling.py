"""Names that scripts import from ``accelerate.big_modeling``. Re-exports only."""

from lockstep.placement.dispatch import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)
from lockstep.placement.empty import init_empty_weights, init_on_device
from lockstep.placement.model_hook import cpu_offload_with_hook

__all__ = [
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
]
