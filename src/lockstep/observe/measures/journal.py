"""Lines of JSON that are appended to files by a thread of their own, so that no step waits for a disk.

What is appended goes into a queue in memory (1 µs). The thread turns it into text and writes it, each second, and its
owner has the rest written when the process ends. What is written is in the kernel's hands, so that it outlives the
process: one that is killed loses what it has appended in the last second. A line that was cut off by the end of a
machine has no line break: whoever appends next begins a new line, and readers skip what is no JSON.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("lockstep.measures")

FLUSH_EVERY_S = 1.0
DIGITS = 6

Line = Mapping[str, Any]
"""An object of JSON."""


class Journal:
    """Appends to the files of one folder, which is made with the first line.

    Any thread may append. Where the folder cannot be written, one warning says so, and lines are dropped: a full disk
    does not end training.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting: deque[tuple[str, Line]] = deque()
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()
        self._has_failed = False
        self._is_closed = False

    def append(self, file: str, line: Line) -> None:
        """Have this written to the file of this name within a second."""
        if self._is_closed or os.getpid() != self._owner:
            return
        self._waiting.append((file, line))
        if self._thread is None:
            known = weakref.ref(self), self._wake
            self._thread = threading.Thread(
                target=_write_regularly, args=known, name="lockstep-journal", daemon=True
            )
            self._thread.start()

    def flush(self) -> None:
        """Write what waits, now."""
        if os.getpid() != self._owner:
            # This is a copy of the queue, as in a worker of a data loader.
            return
        with self._lock:
            texts: dict[str, list[str]] = {}
            # The lock is for those who write; whoever appends needs none.
            while self._waiting:
                file, line = self._waiting.popleft()
                texts.setdefault(file, []).append(text_of(line))
            for file, lines in texts.items():
                try:
                    self._write(file, "".join(lines).encode())
                except OSError as error:
                    self.note(error)

    def close(self) -> None:
        """Write what waits, and nothing after that."""
        self.flush()
        self._is_closed = True
        self._wake.set()
        with self._lock:
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()

    def _write(self, file: str, data: bytes) -> None:
        descriptor = self._files.get(file)
        if descriptor is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / file
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._files[file] = descriptor
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data
        while data:
            data = data[os.write(descriptor, data) :]

    def note(self, error: OSError) -> None:
        """Say once that the folder cannot be written."""
        if not self._has_failed:
            self._has_failed = True
            logger.warning(
                "Measures of this run cannot be written to %s: %s. Training goes on without them. Choose "
                "another folder by run_dir.",
                self.folder,
                error.strerror or error,
            )


def _write_regularly(journal: weakref.ref[Journal], wake: threading.Event) -> None:
    """Write, in the thread, which does not keep the journal alive."""
    while not wake.wait(FLUSH_EVERY_S):
        alive = journal()
        if alive is None:
            return
        alive.flush()
        # While this thread waits, nothing of it may hold the journal.
        del alive


def text_of(line: Line) -> str:
    """Return a line of a file. Numbers have six digits behind the point, or six significant ones."""
    return json.dumps(_rounded(line), separators=(",", ":"), default=str) + "\n"


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, DIGITS) if abs(value) >= 1 else float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(name): _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, (list, tuple)) else value
