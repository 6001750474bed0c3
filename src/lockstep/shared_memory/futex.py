"""Sleep until a word of shared memory changes, and wake those who sleep: Linux's futex, by its system call.

Words are the lower 32 bits of 64-bit counters (little-endian). The calls let go of the interpreter's lock.
See ``man 2 futex``: FUTEX_WAIT compares and falls asleep as one step, so that no wake is lost.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

WAIT, WAKE = 0, 1
# Of the system call on x86-64.
FUTEX_NUMBER = 202
EVERYONE = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _system_call() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    function.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    )
    return function


class Futex:
    """The system call, found once."""

    def __init__(self) -> None:
        self._call = _system_call()
        self._number = FUTEX_NUMBER

    def wait(self, address: int, seen: int, limit_s: float) -> None:
        """Return at once if the word is no longer ``seen``, else when it was woken, interrupted or out of time."""
        limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
        # A futex has 32 bits: on x86-64 the low half of a word stands at its address.
        self._call(self._number, address, WAIT, seen & 0xFFFFFFFF, ctypes.byref(limit), None, 0)

    def wake(self, address: int) -> None:
        """Wake all who sleep on the word."""
        self._call(self._number, address, WAKE, EVERYONE, None, None, 0)
