"""Where things lie in the memory that the ranks of a group share.

First a line of words for each rank, then two slots for each rank, then a ring for each ordered pair of ranks. Memory
that nothing was written to is not taken from the system.
"""

from __future__ import annotations

from dataclasses import dataclass

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
class GroupLayout:
    """Offsets in bytes, for a group of ``ranks`` ranks."""

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
        """The index of the first word of a rank's line."""
        return (1 + rank) * WORDS_A_LINE

    def slot(self, rank: int, parity: int) -> int:
        return self.slots + (2 * rank + parity) * self.slot_bytes

    def ring(self, sender: int, receiver: int) -> int:
        """Where messages from one rank to another are."""
        return self.rings + (sender * self.ranks + receiver) * (RING_HEAD_BYTES + PIECES * self.piece_bytes)
