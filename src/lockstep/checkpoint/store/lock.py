"""One run at a time writes a directory of checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from typing import ClassVar

from lockstep.errors import CheckpointError


@dataclass
class _Held:
    handle: int
    process: int
    holders: int = 1


class DirectoryLock:
    """A file that this process has locked; the system lets go of it when the process ends, however it ends.

    The lock is POSIX's record lock: it holds among processes, also over NFS, and is not inherited by workers. It
    belongs to the process as a whole, so that the objects of one process that lock one file share it.
    """

    _held: ClassVar[dict[str, _Held]] = {}

    def __init__(self, path: str, what: str) -> None:
        self.path = path
        self.what = what
        self._key: str | None = None

    def acquire(self) -> None:
        """Lock; nothing if this object has done so.

        Raises:
            CheckpointError: another process has; names it.
        """
        if self._key is not None:
            return
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        key = os.path.realpath(self.path)
        held = self._held.get(key)
        if held is not None and held.process == os.getpid() and _is_at(held.handle, key):
            held.holders += 1
        else:
            self._held[key] = _Held(self._locked(), os.getpid())
        self._key = key

    def _locked(self) -> int:
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = _owner(handle)
                os.close(handle)
                raise CheckpointError(
                    f"{self.what} is being written by {owner}. End that run, or save to a directory of your own."
                ) from error
            if _is_at(handle, self.path):
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(_this_process()).encode(), 0)
                return handle
            os.close(handle)  # its owner removed it after it was opened here

    def release(self) -> None:
        """Unlock and remove the file, if nobody else in this process holds it; nothing if it is not locked."""
        key, self._key = self._key, None
        held = self._held.get(key) if key is not None else None
        if key is None or held is None or held.process != os.getpid():  # a fork's copy of it is not the lock
            return
        held.holders -= 1
        if held.holders:
            return
        del self._held[key]
        try:
            if _is_at(held.handle, key):
                os.unlink(key)
        except OSError:
            pass  # the folder is gone: so is the lock
        finally:
            os.close(held.handle)

    def __del__(self) -> None:
        self.release()


def _this_process() -> dict[str, object]:
    return {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}


def _owner(handle: int) -> str:
    try:
        told = json.loads(os.pread(handle, 4096, 0))
        return f"process {told['process']} on {told['host']} since {told['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _is_at(handle: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
