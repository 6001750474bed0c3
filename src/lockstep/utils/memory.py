"""Names that scripts import from ``accelerate.utils.memory``."""

from lockstep.runtime.memory import clear_device_cache, find_executable_batch_size, release_memory
from lockstep.runtime.memory import is_out_of_memory as should_reduce_batch_size

__all__ = [
    "clear_device_cache",
    "find_executable_batch_size",
    "release_memory",
    "should_reduce_batch_size",
]
