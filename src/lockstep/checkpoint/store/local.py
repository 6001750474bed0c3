"""Checkpoints in local directories: the only module that touches local files of a checkpoint.

A process may be killed between any two operations. Directories that were published are never changed: one that is
replaced is moved aside as ``<name>.old``, and removed only when its successor has been verified.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from typing import ClassVar

from lockstep.checkpoint.format.digest import Chunk, Digest, FileRecord, record_of
from lockstep.checkpoint.format.documents import MANIFEST
from lockstep.checkpoint.store.base import BLOCK_BYTES, REMOVED, REPLACED, STAGING, Lock
from lockstep.checkpoint.store.lock import DirectoryLock
from lockstep.errors import CheckpointError, UsageError


class LocalStore:
    """Directories of a POSIX file system, where renaming a directory is atomic."""

    is_local: ClassVar[bool] = True

    def __init__(self) -> None:
        self._on_disk: set[str] = set()

    def begin(self, directory: str) -> str:
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
        self.write(f"{staging}/{MANIFEST}", [manifest])
        for folder in self._folders(staging):
            sync(folder)
        if os.path.isdir(directory) and os.listdir(directory):
            os.rename(directory, directory + REPLACED)
        os.rename(staging, directory)
        sync(os.path.dirname(directory) or ".")

    def settle(self, directory: str) -> None:
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
                f"{root} is a link, but a checkpoint holds plain files. Replace it by what it stands for."
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

    def carry(self, directory: str, into: str, names: Iterable[str]) -> None:
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
            self.carry(directory, removed, sorted(ours, key=lambda name: name != MANIFEST))
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
                f"{directory} is no checkpoint but {found}, which save_state would replace as a whole. Pass a "
                "directory that does not exist yet."
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
    """A plain file, open for reading. Raises CheckpointError for anything else, for which opening could wait."""
    if stat.S_ISLNK(os.lstat(path).st_mode):
        raise CheckpointError(
            f"{path} is a link, but a checkpoint holds plain files. Replace it by what it stands for."
        )
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(
            f"{path} is no plain file, as those of a checkpoint are. Replace it by what it stands for."
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
