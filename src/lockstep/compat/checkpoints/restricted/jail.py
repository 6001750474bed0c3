"""Take away from this process what reading bytes does not need, before the first byte is read.

Layers, each by itself enough against a pickle that runs code, were the interpreter of opcodes ever to allow it:
limits of the kernel (no further file or socket can be opened, nothing written, no process started), no
network, no privileges to gain, death with the parent, and a hook that ends the process at whatever Python
reports to its audit events.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys

FORBIDDEN = 86
"""Exit code of a process that did what it must not; its standard error names it."""

_NEW_USER = 0x10000000
_NEW_NET = 0x40000000
_NEW_IPC = 0x08000000
_SET_PARENT_DEATH_SIGNAL = 1
_SET_DUMPABLE = 4
_SET_NO_NEW_PRIVILEGES = 38
_SIGKILL = 9
_CAPABILITIES_VERSION_3 = 0x20080522


def lock(memory_bytes: int, cpu_s: int) -> None:
    """Irrevocable. What a platform does not have is left out, except the limits and the hook."""
    limit(memory_bytes, cpu_s)
    sys.addaudithook(_end_at_any_event)


def limit(memory_bytes: int, cpu_s: int) -> None:
    """Apply the layers that the kernel enforces."""
    if sys.platform == "linux":
        _drop_rights()
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NOFILE, 0),
    ):
        _lower(kind, value)


def _drop_rights() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_PARENT_DEATH_SIGNAL, _SIGKILL, 0, 0, 0)
    libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    # Without privileges a process gets a network of its own only in a user namespace of its own.
    if libc.unshare(_NEW_USER | _NEW_NET | _NEW_IPC) != 0:
        libc.unshare(_NEW_NET)
    # Root could raise the limits again; without capabilities it cannot.
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION_3, 0)
    libc.capset(header, (ctypes.c_uint32 * 6)())
    libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def _lower(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    try:
        resource.setrlimit(kind, (value, value))
    except (ValueError, OSError):
        # macOS knows no such limit.
        if kind != resource.RLIMIT_AS:
            raise


def _end_at_any_event(event: str, arguments: tuple[object, ...]) -> None:
    # Nothing that this process still has to do is an audit event.
    os.write(2, f"did {event[:60]}\n".encode("ascii", "replace"))
    os._exit(FORBIDDEN)
