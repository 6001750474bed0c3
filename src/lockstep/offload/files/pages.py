"""Pages of memory-mapped files: which tensors lie in them, reading them in and letting them go (Linux)."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from os import PathLike

import numpy as np
import torch

from lockstep.errors import OffloadError

# Since Linux 5.14; Python's mmap has no name for it.
_POPULATE_READ = 22
# Bytes between two looks at whether to stop; fewer would not read slower.
_PIECE_BYTES = 8 * 2**20
_PAGE = mmap.PAGESIZE
# Bytes for each page in /proc/self/pagemap.
_ENTRY_BYTES = 8
# The page is in memory or in swap.
_IS_PRESENT = np.uint64(0b11 << 62)
_IS_OF_FILE = np.uint64(1 << 61)


@dataclass(frozen=True)
class FileMapping:
    """Addresses ``start`` to ``end`` hold what is in a file from ``offset`` on."""

    start: int
    end: int
    offset: int
    # What is written there does not get into the file.
    is_private: bool
    path: str
    # Device and inode of what is at the path; None where that is another file.
    identity: tuple[int, int] | None

    def check(self, end: int) -> None:
        """Raise OffloadError where the file has been truncated before the address ``end``."""
        if self.identity is None:
            return
        try:
            status = os.stat(self.path)
        except OSError:
            # It is unlinked, and its contents are still there.
            return
        needed = self.offset + end - self.start
        if (status.st_dev, status.st_ino) == self.identity and status.st_size < needed:
            raise OffloadError(
                f"{self.path} has been truncated to {status.st_size} bytes while weights are mapped from its "
                f"first {needed}. Load the model again from a complete file. Replace such a file by renaming, "
                "and never write into it."
            )


def file_mappings() -> list[FileMapping]:
    """Return the file mappings of this process, by address; none where the system does not tell."""
    try:
        with open("/proc/self/maps") as lines:
            found = [_parsed(line) for line in lines]
    except OSError:
        return []
    return [mapping for mapping in found if mapping is not None]


class Pages:
    """The pages of mapped files in which tensors lie. Those of them that are not mapped are left alone.

    ``nbytes``: of the pages, whole ones.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], mappings: Sequence[FileMapping] | None = None
    ) -> None:
        plain = [part for tensor in tensors for part in _parts(tensor)]
        # As long as they live, addresses are right.
        self._storages = [tensor.untyped_storage() for tensor in plain]
        self._spans = _spans(plain, file_mappings() if mappings is None else mappings) if plain else []
        # The last one in each mapping.
        self._ends = {span.mapping: span.end for span in self._spans}
        self.nbytes = sum(_outer_end(span.end) - _outer_start(span.start) for span in self._spans)

    def check(self) -> None:
        """Raise OffloadError where a file has been truncated: what is mapped behind its end cannot be touched."""
        for mapping, end in self._ends.items():
            mapping.check(end)

    def populate(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Read them in, unless ``stopped`` meanwhile.

        Raises:
            OffloadError: a file was truncated, or cannot be read.
        """
        self.check()
        for span in self._spans:
            end = _outer_end(span.end)
            for start in range(_outer_start(span.start), end, _PIECE_BYTES):
                if stopped():
                    return
                span.populate(start, min(_PIECE_BYTES, end - start))

    def drop(self) -> None:
        """Let go those that no other tensor shares, and that hold nothing but what is in the file."""
        for span in self._spans:
            # The other way round: whole pages alone.
            start, end = _outer_end(span.start), _outer_start(span.end)
            if end > start:
                # What was written to a shared mapping is in the file; to a private one, in these pages alone.
                for first, last in _unwritten(start, end) if span.mapping.is_private else [(start, end)]:
                    _advise(first, last - first, mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class _AddressRange:
    """Addresses in one mapping, all of them of a group's tensors."""

    start: int
    end: int
    mapping: FileMapping

    def populate(self, start: int, nbytes: int) -> None:
        code = _advise(start, nbytes, _POPULATE_READ)
        # An older kernel.
        if code == errno.EINVAL:
            _touch(start, nbytes)
        elif code:
            mapping = self.mapping
            # It may have been truncated since the check before.
            mapping.check(self.end)
            raise OffloadError(
                f"{nbytes} bytes at {mapping.offset + start - mapping.start} of {mapping.path} cannot be read: "
                f"{os.strerror(code)}. The file may have been truncated, or its disk may have failed. Load the "
                "model again."
            )


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors in host memory of which it is made, such as the local part of a DTensor."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        # A DTensor's mesh is among them.
        inside = (getattr(tensor, name) for name in names)
        for part in inside:
            if isinstance(part, torch.Tensor):
                yield from _parts(part)
    elif tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel():
        yield tensor.detach()


def _spans(tensors: Sequence[torch.Tensor], mappings: Sequence[FileMapping]) -> list[_AddressRange]:
    spans: list[_AddressRange] = []
    starts = [mapping.start for mapping in mappings]
    for start, end in sorted(map(_extent, tensors)):
        # A tensor may lie in several mappings: the kernel divides one whose parts were advised differently.
        while start < end:
            index = bisect_right(starts, start) - 1
            if index < 0 or mappings[index].end <= start:
                # It is in memory.
                break
            mapping = mappings[index]
            last = spans[-1] if spans else None
            # Neighbours are one span, as the page in which they meet lies wholly in none of the two.
            if last is not None and last.mapping is mapping and last.end >= start:
                spans[-1] = _AddressRange(last.start, max(last.end, min(end, mapping.end)), mapping)
            else:
                spans.append(_AddressRange(start, min(end, mapping.end), mapping))
            start = mapping.end
    return spans


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    # Of the first to the last element, which need not be neighbours.
    elements = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.data_ptr()
    return start, start + elements * tensor.element_size()


def _parsed(line: str) -> FileMapping | None:
    """Parse a line of /proc/self/maps: ``start-end permissions offset device inode path``."""
    fields = line.rstrip("\n").split(maxsplit=5)
    if len(fields) < 6 or not fields[5].startswith("/"):
        return None
    start, end = (int(address, 16) for address in fields[0].split("-"))
    identity = None
    try:
        status = os.stat(fields[5])
        if status.st_ino == int(fields[4]):
            identity = status.st_dev, status.st_ino
    except OSError:
        # It is unlinked: nobody can truncate it by its name.
        pass
    return FileMapping(start, end, int(fields[2], 16), fields[1].endswith("p"), fields[5], identity)


def is_untouched(tensor: torch.Tensor) -> bool:
    """Return whether nobody has read or written a mapped tensor, of any shape, since its pages were let go or its file
    was written past them.

    False also where the system does not tell.
    """
    return _share_present(tensor) == 0


def is_mostly_present(tensor: torch.Tensor) -> bool:
    """Return whether most pages of a mapped tensor were read in. False also where the system does not tell."""
    share = _share_present(tensor)
    return share is not None and share > 0.5


def _share_present(tensor: torch.Tensor) -> float | None:
    start, end = _extent(tensor)
    start, end = _outer_start(start), _outer_end(end)
    entries = _page_entries(start, end)
    if not len(entries) or len(entries) < (end - start) // _PAGE:
        return None
    return float(((entries & _IS_PRESENT) != 0).mean())


def _page_entries(start: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return what the system says of the pages from ``start`` to ``end``: too few where it does not tell."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            return np.frombuffer(
                os.pread(
                    pagemap.fileno(), (end - start) // _PAGE * _ENTRY_BYTES, start // _PAGE * _ENTRY_BYTES
                ),
                np.uint64,
            )
    except OSError:
        return np.empty(0, np.uint64)


def _unwritten(start: int, end: int) -> list[tuple[int, int]]:
    """Return the pages from ``start`` to ``end`` that are no copies made by writing to a private mapping, as
    ranges.
    """
    entries = _page_entries(start, end)
    if len(entries) < (end - start) // _PAGE:
        # What is not known is not let go.
        return []
    # Writing to a private mapping makes a copy of the page: it is present, and not of the file.
    clean = ((entries & _IS_PRESENT) == 0) | ((entries & _IS_OF_FILE) != 0)
    if clean.all():
        return [(start, end)]
    found = []
    position = start
    for is_clean, run in groupby(clean.tolist()):
        length = sum(1 for _ in run) * _PAGE
        if is_clean:
            found.append((position, position + length))
        position += length
    return found


def is_in_file(tensor: torch.Tensor, mappings: Sequence[FileMapping]) -> bool:
    """Return whether the memory of a tensor, of any shape, holds what a file holds, and nothing written since."""
    if tensor.device.type != "cpu" or not tensor.numel() or not tensor.is_contiguous():
        return False
    spans = _spans([tensor], mappings)
    if sum(span.end - span.start for span in spans) != tensor.nbytes:
        return False
    pages = [(_outer_start(span.start), _outer_end(span.end)) for span in spans if span.mapping.is_private]
    return all(_unwritten(*one) == [one] for one in pages)


def _touch(start: int, nbytes: int) -> None:
    """Read a byte of each page."""
    pages = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(start), dtype=torch.uint8)
    # Without the GIL.
    pages[::_PAGE].sum()


def _advise(start: int, nbytes: int, advice: int) -> int:
    """madvise, without the GIL; the error's number, or 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), advice)
    return ctypes.get_errno() if failed else 0


def _outer_start(address: int) -> int:
    return address // _PAGE * _PAGE


def _outer_end(address: int) -> int:
    return -(-address // _PAGE) * _PAGE


def map_file(path: str | PathLike[str], writable: bool = False) -> torch.Tensor:
    """Return the bytes of a file as a uint8 tensor that is read from disk where it is used.

    ``writable``: what is written to the tensor is written to the file; otherwise it stays in memory, and
    the file does not change.

    Raises:
        OffloadError: the file cannot be opened, or is empty.
    """
    path = os.fspath(path)
    try:
        size = os.stat(path).st_size
        if size:
            return torch.from_file(path, shared=writable, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise OffloadError(
            f"The file {path} cannot be mapped: {error}. Check that it is there and that this user may "
            f"{'write' if writable else 'read'} it."
        ) from error
    raise OffloadError(f"The file {path} is empty, so it holds no weights. Write it again.")


def read_ahead(*tensors: torch.Tensor) -> None:
    """Begin to read mapped tensors into memory in a thread, while others go on. Errors are left to who uses them."""

    def read() -> None:
        with suppress(OffloadError):
            Pages(tensors).populate()

    threading.Thread(target=read, name="reading-weights", daemon=True).start()
