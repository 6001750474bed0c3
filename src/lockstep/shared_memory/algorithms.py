"""The collectives of ranks that share memory, each as a row of steps between which a rank waits for the others.

Sums are taken in the order of the ranks, so that all ranks get the same bits, in every run. ``Memory`` is memory: the
address of its first byte, and its elements as a flat tensor.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.shared_memory.slots import CollectiveSteps, RankSlots

Combine = Callable[..., Tensor]

COMBINE: dict[object, Combine] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PREMUL_SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}

# Up to this size every rank sums everything itself: one wait instead of two.
SUM_EVERYTHING_BYTES = 32 * 1024
LARGEST_ITEM = 16


class Memory(NamedTuple):
    """Contiguous memory of this process."""

    address: int
    flat: Tensor

    @property
    def size(self) -> int:
        """In bytes."""
        return self.flat.numel() * self.flat.element_size()


def memory_of(tensor: Tensor) -> Memory:
    """Return the memory, (n,), of a contiguous CPU tensor of any shape, which the caller keeps, without its
    history: what is written is seen by no version counter, as with any other backend."""
    address, size = tensor.data_ptr(), tensor.numel()
    if size == 0:
        return Memory(address, torch.empty(0, dtype=tensor.dtype))
    if not address:
        raise UsageError(
            f"A collective got a tensor of shape {list(tensor.shape)} that has no values, such as a weight of another "
            "rank of a pipeline. Send tensors of this rank."
        )
    # Without its storage: views of an autograd leaf could not be written to.
    memory = (ctypes.c_char * (size * tensor.element_size())).from_address(address)
    return Memory(address, torch.frombuffer(memory, dtype=tensor.dtype))


def own_memory(tensor: Tensor) -> Memory:
    """Return the memory of a contiguous tensor, of any shape, made for the call. Kept for as long as what is
    returned.
    """
    return Memory(tensor.data_ptr(), tensor.view(-1))


class RankReduction(NamedTuple):
    """How values of the ranks become one. ``factor``: each is multiplied by it first."""

    kind: object
    factor: float | Tensor | None = None

    @property
    def combine(self) -> Combine:
        return COMBINE[self.kind]

    def before(self, block: Memory) -> None:
        """Prepare this rank's own values, in place."""
        if self.factor is not None:
            block.flat.mul_(self.factor)

    def after(self, total: Tensor, ranks: int) -> None:
        """Finish the combined values [n], in place."""
        if self.kind == dist.ReduceOp.AVG:
            total.div_(ranks)


@functools.cache
def check_reduction(kind: object, dtype: torch.dtype) -> None:
    """Raise UsageError if values of the dtype cannot be combined so."""
    name = getattr(kind, "name", str(kind))
    if kind == dist.ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(
            f"The mean of {dtype} tensors cannot be stored as {dtype}. Use the sum, and divide it in the script."
        )
    # Tried on one element: which kernels exist for a dtype stands in no table of torch.
    try:
        COMBINE[kind](torch.ones(1, dtype=dtype), torch.ones(1, dtype=dtype), out=torch.ones(1, dtype=dtype))
    except (KeyError, RuntimeError, TypeError) as error:
        raise UsageError(
            f"{dtype} tensors cannot be reduced with {name}. Convert them to a dtype that can be reduced, such "
            "as float32."
        ) from error


def combine_in_order(parts: Sequence[Tensor], combine: Combine, out: Tensor) -> None:
    """Combine all ranks' parts [n], the first rank's first, in ``out`` [n]; it may be one of the first two."""
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)


def _region(of: int, slot_of: int) -> int:
    """Return which part of a rank's slot is for another rank: none is for itself."""
    return of if of < slot_of else of - 1


class HostCollectives:
    """The collectives of ranks that all share memory.

    Each returns the row of steps of one call. ``call`` is its code, which the ranks compare.
    """

    def __init__(self, slots: RankSlots) -> None:
        self.slots = slots

    def barrier(self, call: int) -> CollectiveSteps:
        slots = self.slots
        slots.begin_chunk(call)
        yield slots.arrive()
        slots.check_calls()

    def broadcast(self, call: int, block: Memory, root: int) -> CollectiveSteps:
        slots = self.slots
        start, size, most = 0, block.size, slots.slot_bytes
        # One chunk at least, also for an empty block: every rank must arrive as often, and be compared.
        while True:
            count = min(most, size - start)
            slots.begin_chunk(call)
            if slots.rank == root:
                slots.put(block.address + start, count)
            yield slots.arrive()
            slots.check_calls()
            if slots.rank != root:
                slots.take(root, block.address + start, count)
            start += count
            if start >= size:
                return

    def all_reduce(self, call: int, block: Memory, reduction: RankReduction) -> CollectiveSteps:
        """Combine (n,) of all ranks, on every rank."""
        slots = self.slots
        reduction.before(block)
        # Of two ranks each reads the other's n values either way, so that the second wait would save nothing.
        if slots.ranks == 2 or block.size <= SUM_EVERYTHING_BYTES:
            yield from self._sum_everything(call, block, reduction)
        else:
            yield from self._sum_parts(call, block, reduction)

    def _sum_everything(self, call: int, block: Memory, reduction: RankReduction) -> CollectiveSteps:
        """Let each rank combine all that lies in the slots."""
        slots = self.slots
        flat, dtype, combine = block.flat, block.flat.dtype, reduction.combine
        item = dtype.itemsize
        most = slots.slot_bytes // item
        for start in range(0, max(1, flat.numel()), most):
            piece = flat[start : start + most]
            count = piece.numel()
            slots.begin_chunk(call)
            slots.put(block.address + start * item, count * item)
            yield slots.arrive()
            slots.check_calls()
            parts = [slots.typed(rank, dtype, 0, count) for rank in range(slots.ranks)]
            # In place of a copy from the slot. With more ranks the first sum would overwrite it too early.
            if slots.ranks == 2:
                parts[slots.rank] = piece
            combine_in_order(parts, combine, piece)
            reduction.after(piece, slots.ranks)

    def _sum_parts(self, call: int, block: Memory, reduction: RankReduction) -> CollectiveSteps:
        """Let each rank combine one part of each chunk, and lay it down for the others."""
        slots = self.slots
        flat, dtype, combine = block.flat, block.flat.dtype, reduction.combine
        item = dtype.itemsize
        most = slots.slot_bytes // item
        for start in range(0, flat.numel(), most):
            count = min(most, flat.numel() - start)
            # Rank r combines bounds[r] to bounds[r + 1] of the chunk; parts differ by one element at most.
            bounds = [count * rank // slots.ranks for rank in range(slots.ranks + 1)]
            address = block.address + start * item
            slots.begin_chunk(call)
            slots.put(address, count * item)
            yield slots.arrive()
            slots.check_calls()
            first, last = bounds[slots.rank], bounds[slots.rank + 1]
            if first < last:
                mine = flat[start + first : start + last]
                parts = [slots.typed(rank, dtype, first, last) for rank in range(slots.ranks)]
                combine_in_order(parts, combine, mine)
                reduction.after(mine, slots.ranks)
                # Nobody else reads this part of the own slot before the next wait.
                slots.put(address + first * item, (last - first) * item, first * item)
            yield slots.arrive()
            for rank in range(slots.ranks):
                if rank != slots.rank:
                    first, last = bounds[rank], bounds[rank + 1]
                    slots.take(rank, address + first * item, (last - first) * item, first * item)

    def reduce(self, call: int, block: Memory, reduction: RankReduction, root: int) -> CollectiveSteps:
        """Combine (n,) of all ranks on ``root``; the others keep theirs."""
        slots = self.slots
        flat, dtype, combine = block.flat, block.flat.dtype, reduction.combine
        item = dtype.itemsize
        most = slots.slot_bytes // item
        # A copy, because the other ranks keep their values.
        source = block if reduction.factor is None else own_memory(flat * reduction.factor)
        for start in range(0, max(1, flat.numel()), most):
            count = min(most, flat.numel() - start)
            slots.begin_chunk(call)
            slots.put(source.address + start * item, count * item)
            yield slots.arrive()
            slots.check_calls()
            if slots.rank == root:
                piece = flat[start : start + count]
                combine_in_order(
                    [slots.typed(rank, dtype, 0, count) for rank in range(slots.ranks)], combine, piece
                )
                reduction.after(piece, slots.ranks)

    def all_gather(self, call: int, mine: Memory, gathered: Sequence[int]) -> CollectiveSteps:
        """Gather (n,) of each rank to the addresses of this rank's ``gathered``, one for each rank."""
        slots = self.slots
        size, most = mine.size, slots.slot_bytes
        # The own part lies there already where the input is a view of the output.
        if gathered[slots.rank] != mine.address:
            ctypes.memmove(gathered[slots.rank], mine.address, size)
        for start in range(0, max(1, size), most):
            count = min(most, size - start)
            slots.begin_chunk(call)
            slots.put(mine.address + start, count)
            yield slots.arrive()
            slots.check_calls()
            for rank in range(slots.ranks):
                if rank != slots.rank:
                    slots.take(rank, gathered[rank] + start, count)

    def gather(self, call: int, mine: Memory, gathered: Sequence[int], root: int) -> CollectiveSteps:
        """Gather (n,) of each rank to the addresses of ``root``'s ``gathered``."""
        slots = self.slots
        size, most = mine.size, slots.slot_bytes
        if slots.rank == root:
            ctypes.memmove(gathered[root], mine.address, size)
        for start in range(0, max(1, size), most):
            count = min(most, size - start)
            slots.begin_chunk(call)
            if slots.rank != root:
                slots.put(mine.address + start, count)
            yield slots.arrive()
            slots.check_calls()
            if slots.rank == root:
                for rank in range(slots.ranks):
                    if rank != root:
                        slots.take(rank, gathered[rank] + start, count)

    def reduce_scatter(
        self, call: int, parts: Sequence[Memory], out: Memory, reduction: RankReduction
    ) -> CollectiveSteps:
        """Part r of every rank, each (n,), combined to ``out`` of rank r."""
        slots = self.slots
        dtype, combine, me = out.flat.dtype, reduction.combine, slots.rank
        item, size = dtype.itemsize, out.flat.numel()
        # A slot holds a region of ``most`` elements for each other rank. Its bytes are a multiple of the
        # largest item, so that every region begins at a whole element.
        most = slots.slot_bytes // (slots.ranks - 1) // LARGEST_ITEM * LARGEST_ITEM // item
        if reduction.factor is not None:
            parts = [own_memory(part.flat * reduction.factor) for part in parts]
        for start in range(0, max(1, size), most):
            count = min(most, size - start)
            slots.begin_chunk(call)
            for rank in range(slots.ranks):
                if rank != me:
                    slots.put(
                        parts[rank].address + start * item, count * item, _region(rank, me) * most * item
                    )
            yield slots.arrive()
            slots.check_calls()
            found = []
            for rank in range(slots.ranks):
                first = _region(me, rank) * most
                # The part for itself goes through no slot.
                mine = parts[me].flat[start : start + count]
                found.append(mine if rank == me else slots.typed(rank, dtype, first, first + count))
            piece = out.flat[start : start + count]
            combine_in_order(found, combine, piece)
            reduction.after(piece, slots.ranks)

    def all_to_all(self, call: int, sent: Sequence[Memory], taken: Sequence[Memory]) -> CollectiveSteps:
        """Exchange ``sent[r]`` of each rank for ``taken[s]`` of rank r. Sizes may differ, also be none."""
        slots = self.slots
        me = slots.rank
        # A slot begins with the sizes of all that its rank sends and takes.
        sizes = torch.tensor([block.size for block in (*sent, *taken)])
        head = sizes.nbytes
        most = (slots.slot_bytes - head) // (slots.ranks - 1) // LARGEST_ITEM * LARGEST_ITEM
        start = largest = 0
        while start == 0 or start < largest:
            slots.begin_chunk(call)
            slots.put(sizes.data_ptr(), head)
            for rank, block in enumerate(sent):
                if rank != me and block.size > start:
                    count = min(most, block.size - start)
                    slots.put(block.address + start, count, head + _region(rank, me) * most)
            yield slots.arrive()
            slots.check_calls()
            if start == 0:
                largest = slots.check_sizes()
                ctypes.memmove(taken[me].address, sent[me].address, sent[me].size)
            for rank, block in enumerate(taken):
                if rank != me and block.size > start:
                    count = min(most, block.size - start)
                    slots.take(rank, block.address + start, count, head + _region(me, rank) * most)
            start += most

    def scatter(self, call: int, sent: Sequence[Memory], taken: Memory, root: int) -> CollectiveSteps:
        """Send ``sent[r]`` of ``root`` to ``taken`` of rank r; all of one size."""
        slots = self.slots
        me, size = slots.rank, taken.size
        most = slots.slot_bytes // (slots.ranks - 1)
        if me == root:
            ctypes.memmove(taken.address, sent[me].address, size)
        for start in range(0, max(1, size), most):
            count = min(most, size - start)
            slots.begin_chunk(call)
            if me == root:
                for rank, block in enumerate(sent):
                    if rank != me:
                        slots.put(block.address + start, count, _region(rank, me) * most)
            yield slots.arrive()
            slots.check_calls()
            if me != root:
                slots.take(root, taken.address + start, count, _region(me, root) * most)
