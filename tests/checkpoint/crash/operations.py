"""Every operation that a process does on files below a folder: counted, recorded, and stopped where a test says.

``Interposer`` replaces the functions of ``os`` and ``open`` in this process, for good. Whoever calls them is caught:
Lockstep, ``shutil``, hooks; from Python 3.11 on ``pathlib`` too. That nothing gets past it is seen when the log is
replayed: it makes the same files (``power_failures.assert_model_is_right``).
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Operation:
    """One system call. Paths are relative to the folder; ``to`` is the new name, ``data`` what was to be written.

    ``failed``: the system refused it, as it does with a folder that is there already.

    Kinds: ``open`` (for writing), ``write``, ``truncate``, ``sync`` (of a file or folder), ``rename``, ``unlink``,
    ``mkdir``, ``rmdir``; and ``read`` for opening or listing to read, where these are wanted.
    """

    kind: str
    path: str
    to: str = ""
    data: bytes = b""
    offset: int = 0
    failed: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.path}" + (f" -> {self.to}" if self.to else "")


Stop = Callable[[int, Operation], "BaseException | Kill | None"]
"""From the number of an operation and the operation: what is to happen to it. None: it is done."""


@dataclass(frozen=True)
class Kill:
    """End the process, before the operation or, where it writes, when half is written."""

    half: bool = False


class Interposer:
    """Records operations below ``root`` while it is ``armed``, one at a time, and asks ``stop`` about each."""

    def __init__(self, root: Path, stop: Stop, with_reads: bool = False) -> None:
        self.log: list[Operation] = []
        self.armed = False
        self.root = root
        self._prefix = f"{root}/"
        self._stop = stop
        self._with_reads = with_reads
        self._lock = threading.RLock()

    def install(self) -> None:
        """Take the place of the functions of this process."""
        real_open = os.open

        def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            kind = "open" if flags & FOR_WRITING else "read"
            where = self._path(path, dir_fd)
            return int(self._do(kind, where, lambda: real_open(path, flags, mode, dir_fd=dir_fd)))

        os.open = open_
        for kind, names, where in (
            ("unlink", ("unlink", "remove"), self._one),
            ("rmdir", ("rmdir",), self._one),
            ("mkdir", ("mkdir",), self._one),
            ("rename", ("rename", "replace"), self._two),
            ("sync", ("fsync", "fdatasync"), self._open_file),
            ("truncate", ("ftruncate",), self._open_file),
            ("read", ("listdir", "scandir"), self._listed),
        ):
            for name in names:
                self._replace(name, kind, where)
        self._replace_writes()
        self._replace_open()

    def _replace(self, name: str, kind: str, where: Callable[..., dict[str, Any]]) -> None:
        real = getattr(os, name)

        def function(*args: Any, **options: Any) -> Any:
            return self._do(kind, call=lambda: real(*args, **options), **where(*args, **options))

        setattr(os, name, function)

    def _one(self, path: Any, mode: int = 0, *, dir_fd: int | None = None) -> dict[str, Any]:
        return {"path": self._path(path, dir_fd)}

    def _two(
        self, old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> dict[str, Any]:
        return {"path": self._path(old, src_dir_fd), "to": self._path(new, dst_dir_fd)}

    def _open_file(self, handle: Any, length: int = 0) -> dict[str, Any]:
        return {
            "path": self._path_of(handle if isinstance(handle, int) else handle.fileno()),
            "offset": length,
        }

    def _listed(self, path: Any = ".") -> dict[str, Any]:
        return {"path": self._path_of(path) if isinstance(path, int) else self._path(path, None)}

    def _replace_writes(self) -> None:
        real_write, real_pwrite = os.write, os.pwrite

        def write(handle: int, data: Any) -> int:
            offset = os.lseek(handle, 0, os.SEEK_CUR) if self._path_of(handle) else 0
            return self.write(handle, data, offset, lambda part: real_write(handle, part))

        def pwrite(handle: int, data: Any, offset: int) -> int:
            return self.write(handle, data, offset, lambda part: real_pwrite(handle, part, offset))

        os.write, os.pwrite = write, pwrite

    def write(self, handle: int, data: Any, offset: int, call: Callable[[memoryview], int]) -> int:
        """Write ``data`` by ``call``, which may be told to write only half of them."""
        view = memoryview(data).cast("B")
        path = self._path_of(handle)
        half = view[: len(view) // 2]
        written = self._do(
            "write", path, lambda: call(view), data=bytes(view) if path else b"", offset=offset,
            do_half=lambda: call(half),
        )  # fmt: skip
        return int(written)

    def _replace_open(self) -> None:
        real, interposer = io.open, self

        class Counted(io.FileIO):
            def write(self, data: Any) -> int:
                offset = self.tell()
                return interposer.write(self.fileno(), data, offset, super().write)

        def open_(file: Any, mode: str = "r", buffering: int = -1, *text: Any, **options: Any) -> Any:
            where = "" if isinstance(file, int) else self._path(file, None)
            if not where or set(mode) <= set("rbtU"):
                return self._do("read", where, lambda: real(file, mode, buffering, *text, **options))
            raw = Counted(file, mode.replace("b", "").replace("t", ""), opener=_opener)
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *text, **options)

        builtins.open = io.open = open_

    def _do(self, kind: str, path: str, call: Callable[[], Any], **more: Any) -> Any:
        do_half = more.pop("do_half", None)
        if not path or not self.armed or (kind == "read" and not self._with_reads):
            return call()
        operation = Operation(kind, path, **more)
        with self._lock:
            verdict = self._stop(len(self.log), operation)
            if isinstance(verdict, Kill):
                if verdict.half and do_half is not None:
                    do_half()
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()
            elif verdict is not None:
                if do_half is not None and getattr(verdict, "errno", 0) == errno.ENOSPC:
                    do_half()  # a disk is full in the middle of a write
                self.log.append(replace(operation, failed=True))
                raise verdict
            try:
                result = call()
            except OSError:
                self.log.append(replace(operation, failed=True))
                raise
            self.log.append(operation)
            return result

    def _path(self, path: Any, dir_fd: int | None) -> str:
        """Relative to the root; empty where it is elsewhere."""
        text = os.fsdecode(path)
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        return self._below(os.path.abspath(text))

    def _path_of(self, handle: int) -> str:
        return self._below(os.readlink(f"/proc/self/fd/{handle}"))

    def _below(self, path: str) -> str:
        if path == self._prefix[:-1]:
            return "."
        return path.removeprefix(self._prefix) if path.startswith(self._prefix) else ""


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags, 0o666)
