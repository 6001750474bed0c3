"""Memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_AT_ONCE = 16 << 20


class FreedMemory:
    """Returns freed memory to the system now and then.

    glibc keeps freed tensors of up to 32 MiB, and often does not use them again for one of the same size, because of
    its alignment. Without this, memory grows with every gradient and state that goes to disk.
    """

    def __init__(self) -> None:
        self._trim = _trim_function()
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        """So much was freed since the last call."""
        self._nbytes += nbytes
        if self._trim is not None and self._nbytes >= _AT_ONCE:
            self._nbytes = 0
            self._trim(0)


def _trim_function() -> Callable[[int], object] | None:
    """glibc's ``malloc_trim``, during which other threads run on; None elsewhere."""
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return trim
