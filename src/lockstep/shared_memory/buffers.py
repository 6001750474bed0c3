"""Memory that all ranks of a host map, for collectives whose tensors are made to be exchanged.

Who gathers or reduces asks for the tensor first, and fills it. If it lies in this memory on all ranks, the call copies
nothing:

    all-gather       one region for all ranks. Each writes its own part, and reads the others' parts after the call.
    reduce-scatter   one region for each rank. Each rank adds up its part of all regions.

In each call the ranks say where their tensors are. If one lies elsewhere, because the memory was still in use, the
call goes through the slots. The regions grow in the first call that they are too small for.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.shared_memory.algorithms import HostCollectives, Memory, RankReduction, combine_in_order
from lockstep.shared_memory.call_code import call_code
from lockstep.shared_memory.segment import PAGE_BYTES, TOKEN_BYTES, WORDS_A_LINE, Segment, SegmentAddress
from lockstep.shared_memory.slots import CollectiveSteps, RankSlots
from lockstep.torch_internals.dispatch import modes_are_active, unseen_by_modes

LARGEST_BYTES = 256 * 1024 * 1024
"""Of one region. Larger tensors go through the slots, so that the ranks need little memory for all of them."""
GATHERED_REGIONS = 4
ADDRESS_BYTES = 256
# It stands in the place of a root, in the code of a call.
IN_BUFFERS = 1
NOT_GIVEN = (0, 0)


class Regions:
    """Equal pieces of one segment, behind a line of words for each rank."""

    def __init__(self, slots: RankSlots, count: int) -> None:
        self.slots, self.count = slots, count
        self.capacity = 0
        self.can_grow = True
        self._segment: Segment | None = None
        # Behind the token, each rank's words are on a cache line of their own, which it alone writes.
        self._first_line = -(-TOKEN_BYTES // (8 * WORDS_A_LINE))
        lines = (self._first_line + slots.ranks) * 8 * WORDS_A_LINE
        self._head_bytes = -(-lines // PAGE_BYTES) * PAGE_BYTES
        self.words = memoryview(bytearray())
        self._given = NOT_GIVEN

    def offset(self, region: int) -> int:
        return self._head_bytes + region * self.capacity

    def word(self, rank: int, region: int) -> int:
        return (self._first_line + rank) * WORDS_A_LINE + region

    def tensor(self, region: int, count: int, dtype: torch.dtype, first: int = 0) -> tuple[Tensor, object]:
        """Return ``count`` elements of a region, and an object that lives as long as any tensor on them."""
        assert self._segment is not None
        kind = ctypes.c_char * (count * dtype.itemsize)
        memory = kind.from_buffer(self._segment.memory, self.offset(region) + first * dtype.itemsize)
        with unseen_by_modes():
            return torch.frombuffer(memory, dtype=dtype), memory

    def fits(self, count: int, dtype: torch.dtype) -> bool:
        return 0 < count * dtype.itemsize <= self.capacity

    def give(self, tensor: Tensor, use: int = 0) -> Tensor:
        """Remember that the next call is about this tensor. ``use``: what it says to the others; 0: lies elsewhere."""
        self._given = tensor.data_ptr(), use
        return tensor

    def use_of(self, tensor: Tensor) -> int | None:
        """Return what was remembered; None: the tensor was not made here."""
        (address, use), self._given = self._given, NOT_GIVEN
        return use if address and address == tensor.data_ptr() else None

    def grow(self, call: int, size: int) -> CollectiveSteps:
        """Map regions of so many bytes on all ranks, if they are wanted and there is memory for them."""
        # All ranks decide alike: they grew together so far, and the size is part of a call that was compared.
        if not (self.can_grow and self.capacity < size <= LARGEST_BYTES):
            return
        slots, capacity = self.slots, -(-size // PAGE_BYTES) * PAGE_BYTES
        total = self._head_bytes + self.count * capacity
        segment = None
        text = ctypes.create_string_buffer(ADDRESS_BYTES)
        slots.begin_chunk(call)
        if slots.rank == 0:
            segment = _created(total)
            text.value = segment.address.text().encode() if segment is not None else b""
            slots.put(ctypes.addressof(text), ADDRESS_BYTES)
        yield slots.arrive()
        slots.check_calls()
        if slots.rank != 0:
            slots.take(0, ctypes.addressof(text), ADDRESS_BYTES)
            segment = _opened(text.value.decode())
        # Whether each rank could map it. If one could not, all go on without, and none tries again.
        slots.begin_chunk(call, int(segment is not None))
        yield slots.arrive()
        self.can_grow = all(slots.sizes())
        if segment is not None:
            # All have mapped it, or will not.
            segment.release()
        if segment is not None and self.can_grow:
            self._segment, self.capacity = segment, capacity
            self.words = memoryview(segment.memory)[: self._head_bytes].cast("Q")


def _created(size: int) -> Segment | None:
    try:
        return Segment.create(size)
    except OSError:
        return None


def _opened(address: str) -> Segment | None:
    try:
        return Segment.open(SegmentAddress.from_text(address))
    except (OSError, ValueError):
        return None


def _release(words: memoryview, index: int, process: int) -> None:
    # Not for the copy in a forked process.
    if os.getpid() == process:
        words[index] = 0


class GatheredBuffers(Regions):
    """The outputs of all-gathers: in turns in the regions that no rank uses any more."""

    def __init__(self, slots: RankSlots) -> None:
        super().__init__(slots, GATHERED_REGIONS)
        self._calls = 0

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return the output (count,) of the next all-gather of the group."""
        # The number of the next gather, so that all ranks choose the same region without a word.
        number = self._calls + 1
        region = number % self.count
        # A mode may refuse the call that is to follow, on this rank alone.
        if modes_are_active() or not self.fits(count, dtype) or not self._is_free(region, number):
            return self.give(torch.empty(count, dtype=dtype, device="cpu"))
        tensor, memory = self.tensor(region, count, dtype)
        index = self.word(self.slots.rank, region)
        self.words[index] = number
        # The region is free again when the last tensor on it is gone.
        weakref.finalize(memory, _release, self.words, index, os.getpid()).atexit = False
        return self.give(tensor, number)

    def _is_free(self, region: int, number: int) -> bool:
        """Return whether no rank still reads what an earlier call left there. Others may have begun this one."""
        mine = self.words[self.word(self.slots.rank, region)]
        return mine == 0 and all(
            self.words[self.word(rank, region)] in (0, number) for rank in range(self.slots.ranks)
        )

    def all_gather(
        self, collectives: HostCollectives, mine: Memory, gathered: Sequence[int], use: int
    ) -> CollectiveSteps:
        """Gather (n,) of each rank, which lies at its place in the output already."""
        # Counted when the call is made, not when its turn comes: the next output may be allocated before.
        self._calls += 1
        return self._all_gather(collectives, mine, gathered, use)

    def _all_gather(
        self, collectives: HostCollectives, mine: Memory, gathered: Sequence[int], use: int
    ) -> CollectiveSteps:
        slots = self.slots
        call = call_code("all_gather", mine.flat.numel(), mine.flat.dtype, root=IN_BUFFERS)
        slots.begin_chunk(call, use)
        yield slots.arrive()
        slots.check_calls()
        # On all ranks the output is the same region, for this gather: each wrote its part before it arrived.
        if use and set(slots.sizes()) == {use}:
            return
        yield from collectives.all_gather(call, mine, gathered)
        yield from self.grow(call, mine.size * slots.ranks)


class ReducedBuffers(Regions):
    """The inputs of reduce-scatters: one region for each rank, which it fills again when all ranks have read it."""

    def __init__(self, slots: RankSlots) -> None:
        super().__init__(slots, slots.ranks)
        self._read_at = 0
        self._is_busy = False

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return the input (count,) of the next reduce-scatter of the group.

        Raises:
            RuntimeError: a rank has ended that still has to read the last one.
        """
        if self._is_busy or not self.fits(count, dtype):
            return self.give(torch.empty(count, dtype=dtype, device="cpu"))
        # The region holds the last input until every rank has read it.
        self.slots.await_count(self._read_at)
        return self.give(self.tensor(self.slots.rank, count, dtype)[0], use=1)

    def reduce_scatter(
        self,
        collectives: HostCollectives,
        parts: Sequence[Memory],
        out: Memory,
        reduction: RankReduction,
        use: int,
    ) -> CollectiveSteps:
        """Part r of every rank's input, each (n,), combined to ``out`` of rank r."""
        # From when the call is made, not when its turn comes: until it is done the region may be read.
        self._is_busy = True
        return self._reduce_scatter(collectives, parts, out, reduction, use)

    def _reduce_scatter(
        self,
        collectives: HostCollectives,
        parts: Sequence[Memory],
        out: Memory,
        reduction: RankReduction,
        use: int,
    ) -> CollectiveSteps:
        slots, count = self.slots, out.flat.numel()
        call = call_code("reduce_scatter", count, out.flat.dtype, reduction.kind, IN_BUFFERS)
        slots.begin_chunk(call, use)
        yield slots.arrive()
        slots.check_calls()
        if all(slots.sizes()):
            found = [
                self.tensor(rank, count, out.flat.dtype, slots.rank * count)[0] for rank in range(slots.ranks)
            ]
            combine_in_order(found, reduction.combine, out.flat)
            reduction.after(out.flat, slots.ranks)
            # Without a wait: it is ``allocate`` that waits, before it fills the region again.
            self._read_at = slots.arrive().count
        else:
            yield from collectives.reduce_scatter(call, parts, out, reduction)
            yield from self.grow(call, out.size * slots.ranks)
        self._is_busy = False
