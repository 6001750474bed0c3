"""Reads files of settings, and never waits: opening a pipe waits for a writer."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

KINDS = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_regular_file(path: str | Path, limit: int) -> bytes:
    """The first ``limit`` bytes of a file.

    Raises:
        OSError: it cannot be opened, or is a pipe, a folder, a device or a socket.
        ValueError: the path holds a NUL.
    """
    # looked at before it is opened: opening alone may wind a tape or start a watchdog
    _check(os.stat(path).st_mode, path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        _check(os.fstat(descriptor).st_mode, path)  # it may have been replaced meanwhile
        return file.read(limit)


def _check(mode: int, path: str | Path) -> None:
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, and not a plain file", str(path))
