"""Messages from one rank to another of the same host, through a ring of shared memory.

Sender and receiver each have a counter of the pieces that they have written or taken. A piece is part of one message;
its head says how long the message is and which tag it has. Messages of other tags than the one asked for are kept until
somebody asks. A message lies in memory of the group: it arrives even if its sender has left meanwhile.
"""

from __future__ import annotations

import ctypes
from collections import deque

from lockstep.errors import CollectiveMismatchError
from lockstep.shared_memory.algorithms import Memory
from lockstep.shared_memory.pending import CallQueue
from lockstep.shared_memory.segment import PIECES, RING_HEAD_BYTES, WORDS_A_LINE
from lockstep.shared_memory.slots import CollectiveSteps, Peers, Waitable

# Each counter on a cache line of its own, as one is written by the sender and the other by the receiver.
WRITTEN, TAKEN, HEADS = 0, WORDS_A_LINE, 2 * WORDS_A_LINE
# Two words for each piece: the bytes of the whole message, and the tag.
assert 8 * (HEADS + 2 * PIECES) <= RING_HEAD_BYTES


class WordAtLeast(Waitable):
    """Until a word of the ring, which its other rank writes, is so high."""

    def __init__(self, ring: Ring, index: int, least: int) -> None:
        self.ring, self.index, self.least = ring, index, least

    def is_there(self) -> bool:
        return bool(self.ring.words[self.index] >= self.least)

    def wait(self, deadline: float) -> None:
        ring = self.ring
        ring.peers.await_word(ring.words, ring.base, self.index, self.least, ring.other, deadline)


class Ring:
    """The memory of a channel, as one of its two ranks sees it; ``other`` is the other one."""

    def __init__(self, peers: Peers, sends: bool, other: int) -> None:
        self.peers, self.other = peers, other
        start = peers.layout.ring(*((peers.rank, other) if sends else (other, peers.rank)))
        self.base = peers.segment.base + start
        self.words = memoryview(peers.segment.memory)[start : start + RING_HEAD_BYTES].cast("Q")
        self.piece_bytes = peers.layout.piece_bytes
        self.done = 0

    def await_word(self, index: int, least: int) -> WordAtLeast:
        return WordAtLeast(self, index, least)

    def piece(self) -> int:
        """Return the address of the next piece."""
        return self.base + RING_HEAD_BYTES + self.done % PIECES * self.piece_bytes

    def head(self) -> int:
        return HEADS + 2 * (self.done % PIECES)

    def finish_piece(self, counter: int) -> None:
        self.done += 1
        self.words[counter] = self.done
        self.peers.futex.wake(self.base + 8 * counter)


class Channels:
    """The channels of this rank, made when they are first used."""

    def __init__(self, peers: Peers, name: str) -> None:
        self.peers = peers
        self.name = name
        self._rings: dict[tuple[bool, int], Ring] = {}
        self._queues: dict[tuple[bool, int], CallQueue] = {}
        self._kept: dict[tuple[int, int], deque[bytes]] = {}

    def queue(self, sends: bool, other: int) -> CallQueue:
        key = (sends, other)
        if key not in self._queues:
            way = "to" if sends else "from"
            self._queues[key] = CallQueue(f"lockstep shared memory {self.name} {way} {other}")
        return self._queues[key]

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()

    def _ring(self, sends: bool, other: int) -> Ring:
        if (sends, other) not in self._rings:
            self._rings[sends, other] = Ring(self.peers, sends, other)
        return self._rings[sends, other]

    def send(self, block: Memory, to: int, tag: int) -> CollectiveSteps:
        ring = self._ring(True, to)
        start, size = 0, block.size
        while True:
            # This piece goes where piece ``done - PIECES`` was, which the receiver must have taken.
            if ring.words[TAKEN] + PIECES <= ring.done:
                yield ring.await_word(TAKEN, ring.done - PIECES + 1)
            count = min(ring.piece_bytes, size - start)
            head = ring.head()
            # Words have no sign, but tags may have one.
            ring.words[head], ring.words[head + 1] = size, tag % 2**64
            # Before the counter: the receiver reads the piece as soon as it sees the counter.
            ctypes.memmove(ring.piece(), block.address + start, count)
            ring.finish_piece(WRITTEN)
            start += count
            if start >= size:
                return

    def receive(self, block: Memory, source: int, tag: int) -> CollectiveSteps:
        ring = self._ring(False, source)
        while True:
            # Kept messages came earlier than those in the ring.
            kept = self._kept.get((source, tag % 2**64))
            if kept:
                message = kept.popleft()
                self._check_size(len(message), block, source, tag)
                ctypes.memmove(block.address, message, len(message))
                return
            if ring.words[WRITTEN] <= ring.done:
                yield ring.await_word(WRITTEN, ring.done + 1)
            size, found = ring.words[ring.head()], ring.words[ring.head() + 1]
            if found == tag % 2**64:
                self._check_size(size, block, source, tag)
                yield from self._take(ring, block.address, size)
                return
            # Of another tag: it leaves the ring, as it stands in the way of the message that is asked for.
            memory = (ctypes.c_char * size)()
            yield from self._take(ring, ctypes.addressof(memory), size)
            self._kept.setdefault((source, found), deque()).append(memory.raw)

    def _take(self, ring: Ring, address: int, size: int) -> CollectiveSteps:
        start = 0
        while True:
            if ring.words[WRITTEN] <= ring.done:
                yield ring.await_word(WRITTEN, ring.done + 1)
            count = min(ring.piece_bytes, size - start)
            ctypes.memmove(address + start, ring.piece(), count)
            ring.finish_piece(TAKEN)
            start += count
            if start >= size:
                return

    def _check_size(self, size: int, block: Memory, source: int, tag: int) -> None:
        if size != block.size:
            raise CollectiveMismatchError(
                f"Rank {self.peers.names[source]} sent {size} bytes with tag {tag}, but rank "
                f"{self.peers.names[self.peers.rank]} receives {block.size}. Pass tensors of the same size and dtype."
            )
