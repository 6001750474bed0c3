"""Names that scripts import from ``accelerate.utils.memory``."""

from lockstep.runtime.memory import clear_device_cache, find_executable_batch_size, release_memory

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory"]
