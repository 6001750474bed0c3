"""Write a file from its beginning to its end past the page cache, which is several times as fast for large ones."""

from __future__ import annotations

import errno
import os
from types import TracebackType

import torch

from lockstep.offload.files.direct import aligned_buffer

BUFFER_BYTES = 8 * 2**20


class FileWriter:
    """Collects bytes and writes them in large aligned parts; where the file system allows, directly.

    As a context, of which leaving closes the file. The file is there already, with its full size.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY)
        try:
            self._direct = os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
        except OSError:
            self._direct = os.dup(self._file)
        self._buffer = aligned_buffer(BUFFER_BYTES)
        self._filled = 0
        self._offset = 0

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._direct)
        os.close(self._file)

    def write(self, data: torch.Tensor) -> None:
        """Append bytes (uint8, one dimension). Raises OSError."""
        for part in data.split(BUFFER_BYTES):
            while part.numel():
                taken = part[: BUFFER_BYTES - self._filled]
                self._buffer[self._filled : self._filled + taken.numel()].copy_(taken)
                self._filled += taken.numel()
                part = part[taken.numel() :]
                if self._filled == BUFFER_BYTES:
                    self._flush()

    def finish(self) -> None:
        """Write what is left. Raises OSError."""
        os.close(self._direct)
        self._direct = os.dup(self._file)  # the last part is not aligned
        self._flush()

    def _flush(self) -> None:
        data, done = memoryview(self._buffer.numpy())[: self._filled], 0  # type: ignore[arg-type]
        while done < len(data):
            try:
                done += os.pwrite(self._direct, data[done:], self._offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Some file systems open a file so, but then write only what is aligned otherwise.
                done += os.pwrite(self._file, data[done:], self._offset + done)
        self._offset += done
        self._filled = 0
