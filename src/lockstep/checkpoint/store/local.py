"""Checkpoints in local directories: the only module that touches local files of a checkpoint.

A process may be killed between any two operations. Directories that were published are never changed: one that is
replaced is moved aside as ``<name>.old``, and removed only when its successor has been verified.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from lockstep.checkpoint.format.documents import MANIFEST, Chunk, Digest, FileRecord, record_of
from lockstep.checkpoint.store.base import BLOCK_BYTES, REMOVED, REPLACED, STAGING, Lock
from lockstep.errors import CheckpointError, UsageError


class LocalStore:
    """Directories of a POSIX file system, where renaming a directory is atomic."""

    is_local: ClassVar[bool] = True

    def __init__(self) -> None:
        self._on_disk: set[str] = set()

    def begin(self, directory: str) -> str:
        # First: an old checkpoint that was moved aside must have its name again before anything is removed.
        self._recover(directory)
        self._refuse_foreign(directory)
        staging = directory + STAGING
        for left in (staging, directory + REMOVED):
            self._remove_tree(left)
        self._make_folder(os.path.dirname(staging) or ".")
        os.mkdir(staging)
        return staging

    def write(self, path: str, chunks: Iterable[Chunk]) -> FileRecord:
        digest = Digest()
        # O_EXCL: a file of this name would be another rank's.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for chunk in chunks:
                view = memoryview(chunk)
                for start in range(0, len(view), BLOCK_BYTES):
                    block = view[start : start + BLOCK_BYTES]
                    digest.update(block)
                    _write_all(handle, block)
            os.fsync(handle)
        finally:
            os.close(handle)
        return digest.record()

    def seal(self, path: str) -> FileRecord:
        record = record_of(self.blocks(path))
        sync(path)
        return record

    def publish(self, directory: str, staging: str, manifest: bytes) -> None:
        # The manifest last: without it, the staging area is no checkpoint. Then names reach the disk, then two renames.
        # Killed between these, the run leaves the older one as .old, which ``_recover`` and ``candidates`` find.
        self.write(f"{staging}/{MANIFEST}", [manifest])
        for folder in self._folders(staging):
            sync(folder)
        # A rename replaces an empty folder by itself.
        if os.path.isdir(directory) and os.listdir(directory):
            os.rename(directory, directory + REPLACED)
        os.rename(staging, directory)
        sync(os.path.dirname(directory) or ".")

    def remove_replaced(self, directory: str) -> None:
        if os.path.lexists(directory + REPLACED):
            # The process that published may have been killed before it had.
            sync(os.path.dirname(directory) or ".")
            self._remove_tree(directory + REPLACED)

    def abandon(self, staging: str) -> None:
        shutil.rmtree(staging, ignore_errors=True)

    def exists(self, directory: str) -> bool:
        return os.path.isdir(directory) and bool(os.listdir(directory))

    def candidates(self, directory: str) -> list[str]:
        found = [path for path in (directory, directory + REPLACED) if os.path.isdir(path)]
        return found or [directory]

    def read(self, path: str, limit: int) -> bytes:
        with _opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise CheckpointError(
                    f"{path} has {size} bytes, but at most {limit} are read. Load another checkpoint."
                )
            return file.read()

    def blocks(self, path: str) -> Iterator[Chunk]:
        with _opened(path) as file:
            buffer = memoryview(bytearray(BLOCK_BYTES))
            while count := file.readinto(buffer):
                yield buffer[:count]

    def files(self, root: str) -> dict[str, int | None]:
        if os.path.islink(root):
            raise CheckpointError(
                f"{root} is a link, but a checkpoint holds plain files. Replace it by a copy of its target."
            )
        found: dict[str, int | None] = {}
        pending = [""]
        while pending:
            folder = pending.pop()
            with os.scandir(os.path.join(root, folder)) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    kind = entry.stat(follow_symlinks=False).st_mode
                    if stat.S_ISDIR(kind):
                        pending.append(name)
                    elif stat.S_ISREG(kind):
                        found[name] = entry.stat(follow_symlinks=False).st_size
                    else:
                        found[name] = None
        return found

    def children(self, folder: str) -> list[str]:
        if not os.path.isdir(folder):
            return []
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir()]

    def move_files(self, directory: str, into: str, names: Iterable[str]) -> None:
        for name in names:
            target = f"{into}/{name}"
            if not os.path.lexists(target):
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.rename(f"{directory}/{name}", target)

    def remove(self, directory: str, kept: Collection[str] = ()) -> None:
        removed = directory + REMOVED
        self._remove_tree(removed)
        if not kept:
            os.rename(directory, removed)
        else:
            os.mkdir(removed)
            ours = self.files(directory).keys() - set(kept)
            # First the manifest, without which it is no checkpoint.
            self.move_files(directory, removed, sorted(ours, key=lambda name: name != MANIFEST))
            for folder, _, _ in os.walk(directory, topdown=False):
                if not os.listdir(folder):
                    os.rmdir(folder)
            sync(directory)
        self._remove_tree(removed)

    def free_bytes(self, directory: str) -> int | None:
        folder = os.path.abspath(directory)
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize

    def lock(self, path: str, what: str) -> Lock:
        return DirectoryLock(path, what)

    def _recover(self, directory: str) -> None:
        """Undo half of a replacement: its process was killed between moving the old one aside and publishing."""
        if not os.path.isdir(directory) and os.path.isdir(directory + REPLACED):
            os.rename(directory + REPLACED, directory)

    def _refuse_foreign(self, directory: str) -> None:
        """Raise UsageError where something else than a checkpoint would be replaced."""
        if not os.path.lexists(directory):
            return
        names = sorted(os.listdir(directory)) if os.path.isdir(directory) else None
        if names is None or (names and MANIFEST not in names):
            found = "a file" if names is None else f"a folder with {', '.join(names[:3])}"
            raise UsageError(
                f"{directory} is no checkpoint but {found}, and save_state would delete it. Pass a directory "
                "that does not exist yet."
            )

    def _make_folder(self, path: str) -> None:
        """Make a folder and those above it, with their names on the disk when this returns.

        Those that are there are synced too, once: whoever made them may have been killed before.
        """
        path = os.path.abspath(path)
        if path in self._on_disk and os.path.isdir(path):
            return
        os.makedirs(path, exist_ok=True)
        folder, device = path, os.stat(path).st_dev
        # New names can only be where this user may write, and on this file system.
        while (above := os.path.dirname(folder)) != folder and os.access(above, os.R_OK | os.W_OK):
            if os.stat(above).st_dev != device:
                break
            sync(above)
            folder = above
        self._on_disk.add(path)

    def _folders(self, root: str) -> list[str]:
        return [folder for folder, _, _ in os.walk(root)]

    def _remove_tree(self, path: str) -> None:
        if not os.path.lexists(path):
            return
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
            return
        for folder, folders, names in os.walk(path, topdown=False):
            for name in names:
                os.unlink(os.path.join(folder, name))
            for name in folders:
                inner = os.path.join(folder, name)
                os.unlink(inner) if os.path.islink(inner) else os.rmdir(inner)
        os.rmdir(path)


def _opened(path: str) -> io.FileIO:
    """Open a plain file for reading. Raises CheckpointError for anything else, for which opening
    could wait.
    """
    if stat.S_ISLNK(os.lstat(path).st_mode):
        raise CheckpointError(
            f"{path} is a link, but a checkpoint holds plain files. Replace it by a copy of its target."
        )
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    # What was opened is looked at, as the path may be another file's by now.
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(
            f"{path} is no plain file, but a checkpoint holds plain files. Replace it by a copy of its content."
        )
    return io.FileIO(handle, "rb")


def _write_all(handle: int, block: memoryview) -> None:
    while len(block):
        written = os.write(handle, block)
        if written == 0:
            raise OSError(errno.EIO, "nothing was written")
        block = block[written:]


def sync(path: str) -> None:
    """Bring a file, or the names in a folder, onto the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Locks ------------------------------------------------------------------------------------------------


@dataclass
class LockedFile:
    handle: int
    process: int
    holders: int = 1


class DirectoryLock:
    """A file that this process has locked; the system lets go of it when the process ends, however it ends.

    The lock is POSIX's record lock: it holds among processes, also over NFS, and is not inherited by workers. It
    belongs to the process as a whole, so that the objects of one process that lock one file share it.
    """

    _locked_files: ClassVar[dict[str, LockedFile]] = {}

    def __init__(self, path: str, what: str) -> None:
        self.path = path
        self.what = what
        self._key: str | None = None

    def acquire(self) -> None:
        """Lock. Does nothing if this object has done so.

        Raises:
            CheckpointError: another process has; names it.
        """
        if self._key is not None:
            return
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        key = os.path.realpath(self.path)
        locked = self._locked_files.get(key)
        if locked is not None and locked.process == os.getpid() and _is_at(locked.handle, key):
            locked.holders += 1
        else:
            self._locked_files[key] = LockedFile(self._locked(), os.getpid())
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
                os.pwrite(handle, json.dumps(this_process()).encode(), 0)
                return handle
            # Its owner removed it after it was opened here.
            os.close(handle)

    def release(self) -> None:
        """Unlock and remove the file, if nobody else in this process holds it; nothing if it is not locked."""
        key, self._key = self._key, None
        locked = self._locked_files.get(key) if key is not None else None
        # A fork's copy of it is not the lock.
        if key is None or locked is None or locked.process != os.getpid():
            return
        locked.holders -= 1
        if locked.holders:
            return
        del self._locked_files[key]
        # Unlink, then close: once it is closed, another process may lock the file at this path.
        try:
            if _is_at(locked.handle, key):
                os.unlink(key)
        except OSError:
            # The folder is gone: so is the lock.
            pass
        finally:
            os.close(locked.handle)

    def __del__(self) -> None:
        self.release()


def this_process() -> dict[str, object]:
    """Return what a lock says of the process that holds it."""
    return {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}


def described(process: Mapping[str, object]) -> str:
    """Words for a process, from what it said. Raises KeyError where it said something else."""
    return f"process {process['process']} on {process['host']} since {process['since']}"


def _owner(handle: int) -> str:
    try:
        return described(json.loads(os.pread(handle, 4096, 0)))
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _is_at(handle: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
