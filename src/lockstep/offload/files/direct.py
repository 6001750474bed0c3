"""Tensors in files that are read and written past the page cache, and are gone with the process."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import OffloadError

ALIGNMENT = 4096
"""Regions start at multiples of this many bytes, and direct reads and writes move multiples of it."""

# The kernel moves less than 2 GiB a call.
_MOST_AT_ONCE = 1 << 30


def aligned(nbytes: int) -> int:
    """Return the least multiple of ``ALIGNMENT`` that is not below ``nbytes``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def aligned_buffer(nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` uninitialised bytes of host memory at an address that direct reads and writes take.

    Pinned where there is CUDA.
    """
    room = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    # -p % a: bytes from address p to the next multiple of a.
    start = -room.data_ptr() % ALIGNMENT
    return room[start : start + nbytes]


def region_of(tensor: torch.Tensor) -> tuple[OffloadFile, int] | None:
    """Return the file in which a tensor's memory lies, and the offset of its first element in bytes; None
    for others.
    """
    mark = getattr(tensor.untyped_storage(), "_offload_region", None)
    if mark is None:
        return None
    return mark[0], mark[1] + tensor.storage_offset() * tensor.element_size()


class OffloadFile:
    """A file of aligned regions in a folder, which is gone when the process ends, however it ends.

    Its space is reserved at once, so that a disk that is too small is found here. Tensors in it are memory-mapped:
    they always hold what was last written, through them or by ``write``. While some are written to through the
    mapping, don't ``write`` next to them at the same time.

    Args:
        folder: Where; made if missing.
        nbytes: How many bytes are reserved.

    Raises:
        OffloadError: The folder cannot be made or written to, or has too little space.
    """

    def __init__(self, folder: str | os.PathLike[str], nbytes: int) -> None:
        self.folder = Path(folder)
        self.nbytes = max(aligned(nbytes), ALIGNMENT)
        self.bytes_read = 0
        self.bytes_written = 0
        self._placed = 0
        self._lock = threading.Lock()
        self._fd, self._direct_fd = _reserved(self.folder, self.nbytes)
        # When nobody has this object any more, tensors included.
        weakref.finalize(self, _close, self._fd, self._direct_fd)
        self._map = mmap.mmap(self._fd, self.nbytes)

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes go past the page cache; some file systems cannot."""
        return self._direct_fd != self._fd

    @property
    def free_bytes(self) -> int:
        """How many bytes are not yet placed."""
        return self.nbytes - self._placed

    def place(self, nbytes: int) -> int:
        """Return the offset of a region of ``nbytes`` that nobody else has.

        Raises:
            OffloadError: Less than that is left.
        """
        with self._lock:
            offset = self._placed
            if offset + aligned(nbytes) > self.nbytes:
                raise OffloadError(
                    f"An offload file of {self.nbytes} bytes in {self.folder} has {self.nbytes - offset} left, "
                    f"but {nbytes} are to be placed in it. Make it larger: the size of each region is a multiple "
                    f"of {ALIGNMENT}."
                )
            self._placed = offset + aligned(nbytes)
            return offset

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the region at ``offset`` as a contiguous tensor with a storage of its own, mapped from the
        file.
        """
        count = 1
        for size in shape:
            count *= size
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        nbytes = count * dtype.itemsize
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=offset)
        mark: Any = data.untyped_storage()
        # The file is there as long as its tensors are.
        mark._offload_region = (self, offset)
        return data.view(dtype).view(tuple(shape))

    def read(self, offset: int, buffer: torch.Tensor) -> None:
        """Fill ``buffer`` (uint8 [n]; n, address and ``offset`` multiples of ``ALIGNMENT``) from the file.

        Raises:
            OffloadError: The file cannot be read.
        """
        self._move(os.preadv, "read", offset, buffer)
        with self._lock:
            self.bytes_read += buffer.numel()

    def write(self, offset: int, buffer: torch.Tensor) -> None:
        """Write ``buffer`` (uint8 [n]; n, address and ``offset`` multiples of ``ALIGNMENT``) to the file.

        Raises:
            OffloadError: The file cannot be written.
        """
        self._move(os.pwritev, "write", offset, buffer)
        with self._lock:
            self.bytes_written += buffer.numel()

    def flush(self, offset: int, nbytes: int) -> None:
        """Write what was changed through the tensor of an aligned region to the disk. It stays in memory, too.

        Raises:
            OffloadError: The file cannot be written.
        """
        try:
            _write_pages(self._fd, self._map, offset, nbytes)
        except OSError as error:
            raise self._failed("write", offset, nbytes, error.strerror or str(error)) from error
        with self._lock:
            self.bytes_written += nbytes

    def drop(self, offset: int, nbytes: int) -> None:
        """Let go the memory of a region that was read or written through its tensor; nothing is lost."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED, offset, nbytes)

    def _move(self, move: Callable[..., int], verb: str, offset: int, buffer: torch.Tensor) -> None:
        _check_aligned(offset, buffer)
        if offset + buffer.numel() > self.nbytes:
            raise ValueError(f"{buffer.numel()} bytes at {offset} of an offload file of {self.nbytes}")
        data = buffer.numpy().data
        done = 0
        while done < len(data):
            try:
                moved = move(self._direct_fd, [data[done : done + _MOST_AT_ONCE]], offset + done)
            except OSError as error:
                raise self._failed(
                    verb, offset + done, len(data) - done, error.strerror or str(error)
                ) from error
            # Direct moves cannot go on at a place that is not aligned.
            if moved % ALIGNMENT or not moved:
                raise self._failed(verb, offset + done, len(data) - done, f"only {moved} bytes were moved")
            done += moved

    def _failed(self, verb: str, offset: int, nbytes: int, why: str) -> OffloadError:
        return OffloadError(
            f"Could not {verb} {nbytes} bytes at {offset} of an offload file in {self.folder}: {why}. "
            "Check that disk, or offload to another folder."
        )


# Wait for writes before, write, wait for these.
_WRITE_AND_WAIT = 1 | 2 | 4


def _write_pages(fd: int, mapped: mmap.mmap, offset: int, nbytes: int) -> None:
    """Write the pages of a mapped file that were changed, but not what the file system notes about the file."""
    code = errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "sync_file_range"):
        failed = libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _WRITE_AND_WAIT)
        code = ctypes.get_errno() if failed else 0
    # This file system does not have it.
    if code in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP):
        # mmap writes from the beginning of a page.
        start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        mapped.flush(start, offset + nbytes - start)
    elif code:
        raise OSError(code, os.strerror(code))


def _check_aligned(offset: int, buffer: torch.Tensor) -> None:
    odd = (
        offset % ALIGNMENT or buffer.numel() % ALIGNMENT or (buffer.numel() and buffer.data_ptr() % ALIGNMENT)
    )
    if odd or buffer.dtype != torch.uint8 or not buffer.is_contiguous():
        raise ValueError(
            f"offset {offset} and {buffer.numel()} elements of {buffer.dtype}: the buffer must be one of "
            "aligned_buffer, at an aligned offset"
        )


def _reserved(folder: Path, nbytes: int) -> tuple[int, int]:
    """Two descriptors of a new nameless file of ``nbytes``: for mapping, and for reading and writing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd, path = tempfile.mkstemp(prefix="offload-", dir=folder)
    except OSError as error:
        raise OffloadError(
            f"Cannot make an offload file in {folder}: {error.strerror or error}. "
            "Name a folder on a local disk that this user may write to."
        ) from error
    direct = fd
    try:
        _reserve(fd, folder, nbytes)
        direct = _opened_directly(path, fd)
    except BaseException:
        _close(fd, direct)
        raise
    finally:
        # From now on the file has no name: its space is free once the last descriptor is closed.
        os.unlink(path)
    return fd, direct


def _reserve(fd: int, folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
        elif free < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            os.ftruncate(fd, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            why = error.strerror or str(error)
            raise OffloadError(
                f"Cannot reserve {nbytes} bytes in {folder}: {why}. Name a folder on another local disk."
            ) from error
        raise OffloadError(
            f"Offloading needs {nbytes} bytes in {folder}, where {free} are free. Free some space, or name a "
            "folder on a larger disk."
        ) from error


def _opened_directly(path: str, fd: int) -> int:
    """Return another descriptor of the file that bypasses the page cache; the same one where that is not possible."""
    if not hasattr(os, "O_DIRECT"):
        return fd
    try:
        direct = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return fd
    try:
        # Some file systems open it so, and then refuse to move anything or want a coarser alignment.
        os.preadv(direct, [aligned_buffer(ALIGNMENT).numpy().data], 0)
    except OSError:
        os.close(direct)
        return fd
    return direct


def _close(fd: int, direct: int) -> None:
    for descriptor in {fd, direct}:
        os.close(descriptor)


_AT_ONCE = 16 << 20


class FreedMemory:
    """Returns freed memory to the system now and then.

    glibc keeps freed tensors of up to 32 MiB, and often does not use them again for one of the same size, because of
    its alignment. Without this, memory grows with every gradient and state that goes to disk.
    """

    def __init__(self) -> None:
        self._trim = _trim_function()
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        """So much was freed since the last call."""
        self._nbytes += nbytes
        if self._trim is not None and self._nbytes >= _AT_ONCE:
            self._nbytes = 0
            self._trim(0)


def _trim_function() -> Callable[[int], object] | None:
    """Return glibc's ``malloc_trim``, during which other threads run on; None elsewhere."""
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return trim


STAGING_BYTES = 16 * 2**20


class OffloadedParameters:
    """Tensors of one model in a file of their own, which is gone when the process is.

    Args:
        sizes: Bytes of each tensor that there will be room for.
        folder: Where the file is made; on a file system with enough room for all of it.

    Raises:
        OffloadError: there is not enough room, or the folder cannot be written to.
    """

    def __init__(self, sizes: Iterable[int], folder: str | PathLike[str]) -> None:
        self._file = OffloadFile(folder, sum(map(aligned, sizes)))
        self._staging: torch.Tensor | None = None
        self._freed = FreedMemory()

    @property
    def file(self) -> OffloadFile:
        return self._file

    @torch.no_grad()
    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same values (any shape) as a tensor that is mapped from the file; it is written past
        the page cache.
        """
        if not tensor.numel():
            return tensor
        offset = self._file.place(aligned(tensor.nbytes))
        self._write(offset, tensor)
        # The caller has no more use for it.
        self._freed.add(tensor.nbytes)
        return self._file.tensor(offset, tensor.shape, tensor.dtype)

    def close(self) -> None:
        """Let the staging buffer go; mapped tensors stay what they are."""
        self._staging = None

    def _write(self, offset: int, tensor: torch.Tensor) -> None:
        if self._staging is None:
            self._staging = aligned_buffer(STAGING_BYTES)
        numbers = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for start in range(0, numbers.numel(), STAGING_BYTES):
            piece = numbers[start : start + STAGING_BYTES]
            buffer = self._staging[: aligned(piece.numel())]
            buffer[: piece.numel()].copy_(piece)
            # Direct writes end at a multiple of ALIGNMENT: behind the tensor there are zeros.
            buffer[piece.numel() :].zero_()
            self._file.write(offset + start, buffer)
