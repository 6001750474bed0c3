"""A piece of memory that processes of one host share, and where things lie in it.

It is anonymous (``memfd_create``): it never has a name, neither in ``/dev/shm`` nor elsewhere, does not count against
the size of ``/dev/shm``, and is gone with the last process that maps it, however that ends. Others open it by the
process and descriptor of its maker. Each process keeps a lock on one byte of it, which the system lets go of when the
process ends: so the others see that it lives.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import struct
from dataclasses import dataclass

TOKEN_BYTES = 16
# struct flock of 64-bit Linux: type, whence, start, length, process
LOCK = "hh4xqqi4x"
RELEASED = -1

LINE_BYTES = 64
WORDS_A_LINE = LINE_BYTES // 8
PAGE_BYTES = 4096
# Words of a rank's line: its counter, what it is doing in each of the two slots, how much, whether it gave up.
CALLS, SIZES, ABORTED = 1, 3, 5

SLOT_BYTES = 512 * 1024
RING_HEAD_BYTES = PAGE_BYTES
PIECES = 4
PIECE_BYTES = 512 * 1024
# In groups of more ranks, which have many rings, these are smaller.
MANY_RANKS = 16
SMALL_PIECE_BYTES = 64 * 1024


@dataclass(frozen=True)
class SegmentAddress:
    """By what another process of this host opens a segment. ``token`` stands at its beginning; "" is not compared."""

    pid: int
    descriptor: int
    size: int
    token: str

    def text(self) -> str:
        return f"{self.pid}:{self.descriptor}:{self.size}:{self.token}"

    @staticmethod
    def from_text(text: str) -> SegmentAddress:
        pid, descriptor, size, token = text.split(":")
        return SegmentAddress(int(pid), int(descriptor), int(size), token)


class Segment:
    """Shared memory, mapped here. The first ``TOKEN_BYTES`` are its token.

    Attributes:
        memory: All of it.
        base: The address of its first byte in this process.
        address: For the others.
    """

    def __init__(self, descriptor: int, address: SegmentAddress) -> None:
        self._descriptor = descriptor
        self.memory = mmap.mmap(descriptor, address.size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.address = address

    @staticmethod
    def create(size: int) -> Segment:
        """Make a new one of so many bytes, all zero but for its token.

        Raises:
            OSError: the system gives no such memory.
        """
        descriptor = os.memfd_create("lockstep")
        os.ftruncate(descriptor, size)
        token = secrets.token_bytes(TOKEN_BYTES)
        segment = Segment(descriptor, SegmentAddress(os.getpid(), descriptor, size, token.hex()))
        segment.memory[:TOKEN_BYTES] = token
        return segment

    @staticmethod
    def open(address: SegmentAddress) -> Segment:
        """Map that of another process.

        Raises:
            OSError: this process may not open it, or it is another one.
        """
        descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        # The maker may have ended, and its number or its descriptor may be another's by now.
        if os.fstat(descriptor).st_size != address.size:
            os.close(descriptor)
            raise OSError(f"descriptor {address.descriptor} of process {address.pid} is something else")
        segment = Segment(descriptor, address)
        if address.token and segment.memory[:TOKEN_BYTES].hex() != address.token:
            segment.release()
            raise OSError(f"descriptor {address.descriptor} of process {address.pid} is another segment")
        return segment

    def hold(self, rank: int) -> None:
        """Lock the byte of this rank for as long as this process lives."""
        fcntl.fcntl(self._descriptor, fcntl.F_SETLK, struct.pack(LOCK, fcntl.F_WRLCK, 0, rank, 1, 0))

    def is_held(self, rank: int) -> bool:
        """Return whether another process holds the lock of this rank: whether it lives."""
        asked = struct.pack(LOCK, fcntl.F_WRLCK, 0, rank, 1, 0)
        found = struct.unpack(LOCK, fcntl.fcntl(self._descriptor, fcntl.F_GETLK, asked))
        return bool(found[0] != fcntl.F_UNLCK)

    @property
    def is_released(self) -> bool:
        return self._descriptor == RELEASED

    def release(self) -> None:
        """Let go of the lock. The memory stays mapped while anything uses it."""
        descriptor, self._descriptor = self._descriptor, RELEASED
        # A lock of POSIX goes when any descriptor of its file is closed.
        os.close(descriptor)


@dataclass(frozen=True)
class GroupLayout:
    """Where things lie in the memory of a group of ``ranks`` ranks, as offsets in bytes.

    First a line of words for each rank, then two slots for each rank, then a ring for each ordered pair of ranks.
    Memory that nothing was written to is not taken from the system.
    """

    ranks: int
    slot_bytes: int = SLOT_BYTES

    @property
    def piece_bytes(self) -> int:
        """Of what is laid into a ring at once."""
        return PIECE_BYTES if self.ranks <= MANY_RANKS else SMALL_PIECE_BYTES

    @property
    def slots(self) -> int:
        """Where the lines end and the slots begin."""
        return -(-LINE_BYTES * (1 + self.ranks) // PAGE_BYTES) * PAGE_BYTES

    @property
    def rings(self) -> int:
        return self.slots + 2 * self.ranks * self.slot_bytes

    @property
    def size(self) -> int:
        # Where a ring behind the last one would begin.
        return self.ring(self.ranks, 0)

    def word(self, rank: int) -> int:
        """Return the index of the first word of a rank's line."""
        return (1 + rank) * WORDS_A_LINE

    def slot(self, rank: int, parity: int) -> int:
        return self.slots + (2 * rank + parity) * self.slot_bytes

    def ring(self, sender: int, receiver: int) -> int:
        """Return where messages from one rank to another are."""
        return self.rings + (sender * self.ranks + receiver) * (RING_HEAD_BYTES + PIECES * self.piece_bytes)
