"""A folder in the memory of this machine that lasts as long as the process that owns it; no torch.

Its owner keeps it locked, and removes it. What an owner left that was killed, whoever makes the next folder removes.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress

MEMORY = "/dev/shm"
PREFIX = "lockstep-memory-"


class MemoryFolder:
    """A new folder below ``/dev/shm``, which only this user can open.

    Raises:
        OSError: this system has no such place, or it is full.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        for name in os.listdir(MEMORY):
            if re.fullmatch(rf"{PREFIX}[a-z0-9_]{{8}}", name):
                _remove_unowned(f"{MEMORY}/{name}")
        while True:
            self.path = tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY)
            handle = _locked(self.path)
            # Between the two calls another process may have taken it for an unowned one.
            if handle is not None:
                self._handle = handle
                return

    def close(self) -> None:
        """Remove it. In a forked child this does nothing: the folder is its parent's."""
        if os.getpid() != self._owner:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)


def _locked(path: str) -> int | None:
    """Return the folder, locked until this is closed or the process ends; None if it is gone or another process has
    it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its owner may have removed it before it was locked: then the path is gone, or another folder's.
        if os.path.samestat(os.fstat(handle), os.lstat(path)):
            return handle
    except OSError:
        pass
    os.close(handle)
    return None


def _remove_unowned(path: str) -> None:
    """Remove a folder of this user that no process has locked."""
    with suppress(OSError):
        if os.lstat(path).st_uid != os.geteuid():
            return
    handle = _locked(path)
    if handle is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)
