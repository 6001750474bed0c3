"""Collectives of ranks on several hosts: shared memory inside a host, gloo between the first ranks of the hosts.

What travels between hosts are bytes, so that every dtype can; sums are taken here. Sums run over the ranks of a host in
their order, then over the hosts in the order of their first ranks: all ranks get the same bits, in every run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.shared_memory.algorithms import (
    HostCollectives,
    Memory,
    RankReduction,
    combine_in_order,
    own_memory,
)
from lockstep.shared_memory.pending import CallQueue
from lockstep.shared_memory.slots import CollectiveSteps, Waitable

# torch takes a timeout of 0 for none.
LEAST_WAIT_S = 0.001


class GlooWork(Waitable):
    """A call of gloo. It may be waited for once only."""

    def __init__(self, work: dist.Work) -> None:
        self.work, self.was_waited_for = work, False

    def is_there(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self, deadline: float) -> None:
        self.was_waited_for = True
        if deadline:
            self.work.wait(timedelta(seconds=max(LEAST_WAIT_S, deadline - monotonic())))
        else:
            self.work.wait()


def finished(work: dist.Work) -> CollectiveSteps:
    """Wait for a call of gloo, and raise what it raises."""
    call = GlooWork(work)
    yield call
    # A failed call is completed as well: only ``wait`` raises its error.
    if not call.was_waited_for:
        call.wait(0.0)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def empty_bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


class HierarchicalCollectives:
    """The collectives of a group on several hosts, as ``HostCollectives`` has them.

    Args:
        rank: This one's, in the group.
        hosts: The group's ranks, host by host.
        host: The collectives of this host; None if it has one rank.
        leaders: gloo between the first ranks of the hosts; None on other ranks.
        everyone: gloo between all ranks.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[Sequence[int]],
        host: HostCollectives | None,
        leaders: Any,
        everyone: Any,
    ) -> None:
        self._rank, self._hosts, self._host = rank, hosts, host
        self._leaders, self._everyone = leaders, everyone
        self._here = next(index for index, ranks in enumerate(hosts) if rank in ranks)
        self._size = sum(len(ranks) for ranks in hosts)

    def barrier(self, call: int) -> CollectiveSteps:
        if self._host is not None:
            yield from self._host.barrier(call)
        if self._leaders is not None:
            yield from finished(self._leaders.barrier())
        # Nobody may go on before the leaders have met: the other ranks of the host wait here for theirs.
        if self._host is not None:
            yield from self._host.barrier(call)

    def broadcast(self, call: int, block: Memory, root: int) -> CollectiveSteps:
        source = next(index for index, ranks in enumerate(self._hosts) if root in ranks)
        # In the root's host first, so that its leader has the values; between leaders; in other hosts.
        if self._host is not None and self._here == source:
            yield from self._host.broadcast(call, block, self._hosts[source].index(root))
        yield from self._between_leaders([block.flat], [source])
        if self._host is not None and self._here != source:
            yield from self._host.broadcast(call, block, 0)

    def all_reduce(self, call: int, block: Memory, reduction: RankReduction) -> CollectiveSteps:
        """(n,) on every rank becomes the combination of all, on every rank."""
        reduction.before(block)
        # Factor and mean are applied once, to what the whole group combines; inside there are plain sums.
        is_sum = reduction.kind in (dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)
        inside = RankReduction(dist.ReduceOp.SUM if is_sum else reduction.kind)
        if self._host is not None:
            yield from self._host.reduce(call, block, inside, 0)
        if self._leaders is not None and block.size:
            yield from self._combine(block.flat, inside)
        if self._host is not None:
            yield from self._host.broadcast(call, block, 0)
        reduction.after(block.flat, self._size)

    def reduce(self, call: int, block: Memory, reduction: RankReduction, root: int) -> CollectiveSteps:
        # On a copy, because ``all_reduce`` overwrites, and the ranks other than ``root`` keep theirs.
        total = own_memory(block.flat.clone())
        yield from self.all_reduce(call, total, reduction)
        if self._rank == root:
            block.flat.copy_(total.flat)

    def reduce_scatter(
        self, call: int, parts: Sequence[Memory], out: Memory, reduction: RankReduction
    ) -> CollectiveSteps:
        """Part r of every rank, each (n,), combined to ``out`` of rank r."""
        whole = torch.cat([part.flat for part in parts])
        yield from self.all_reduce(call, own_memory(whole), reduction)
        out.flat.copy_(whole.view(self._size, -1)[self._rank] if out.size else whole)

    def all_gather(self, call: int, mine: Memory, gathered: Sequence[int]) -> CollectiveSteps:
        """(n,) of each rank to the addresses of this rank's ``gathered``, one for each rank."""
        # In the order of the hosts, so that what a host has gathered is one piece, which its leader can send.
        ranks = [rank for host in self._hosts for rank in host]
        whole = empty_bytes(mine.size * self._size)
        address = {rank: whole.data_ptr() + mine.size * place for place, rank in enumerate(ranks)}
        if self._host is None:
            ctypes.memmove(address[self._rank], mine.address, mine.size)
        else:
            yield from self._host.gather(call, mine, [address[rank] for rank in self._hosts[self._here]], 0)
        pieces = whole.split([mine.size * len(host) for host in self._hosts])
        yield from self._between_leaders(pieces, range(len(pieces)))
        if self._host is not None:
            yield from self._host.broadcast(call, own_memory(whole), 0)
        for rank in ranks:
            ctypes.memmove(gathered[rank], address[rank], mine.size)

    def gather(self, call: int, mine: Memory, gathered: Sequence[int], root: int) -> CollectiveSteps:
        """(n,) of each rank to the addresses of ``root``'s ``gathered``."""
        # An all-to-all in which nobody but ``root`` receives.
        sizes = [mine.size if rank == root else 0 for rank in range(self._size)]
        # Bytes to and from each rank, as ``alltoall_base`` wants them.
        received = [mine.size if self._rank == root else 0] * self._size
        taken = empty_bytes(sum(received))
        yield from self._exchange(as_bytes(mine.flat), sizes, taken, received)
        if self._rank == root:
            for rank, address in enumerate(gathered):
                ctypes.memmove(address, taken.data_ptr() + rank * mine.size, mine.size)

    def scatter(self, call: int, sent: Sequence[Memory], taken: Memory, root: int) -> CollectiveSteps:
        """``sent[r]`` of ``root`` to ``taken`` of rank r; all of one size."""
        given = torch.cat([as_bytes(part.flat) for part in sent]) if self._rank == root else empty_bytes(0)
        # An all-to-all in which nobody but ``root`` sends.
        sizes = [taken.size if self._rank == root else 0] * self._size
        received = [taken.size if rank == root else 0 for rank in range(self._size)]
        yield from self._exchange(given, sizes, as_bytes(taken.flat), received)

    def all_to_all(self, call: int, sent: Sequence[Memory], taken: Sequence[Memory]) -> CollectiveSteps:
        """``sent[r]`` of each rank to ``taken[s]`` of rank r. Sizes may differ, also be none."""
        given = torch.cat([as_bytes(part.flat) for part in sent])
        received = [part.size for part in taken]
        whole = empty_bytes(sum(received))
        yield from self._exchange(given, [part.size for part in sent], whole, received)
        for part, piece in zip(taken, whole.split(received), strict=True):
            ctypes.memmove(part.address, piece.data_ptr(), part.size)

    def _exchange(
        self, sent: Tensor, sizes: list[int], taken: Tensor, received: list[int]
    ) -> CollectiveSteps:
        yield from finished(
            self._everyone.alltoall_base(taken, sent, received, sizes, dist.AllToAllOptions())
        )

    def _between_leaders(self, pieces: Sequence[Tensor], sources: Sequence[int]) -> CollectiveSteps:
        """Each piece from one leader to the others, all at once."""
        if self._leaders is None:
            return
        works = []
        for piece, source in zip(pieces, sources, strict=True):
            if piece.numel():
                options = dist.BroadcastOptions()
                options.rootRank, options.rootTensor = source, 0
                works.append(self._leaders.broadcast([as_bytes(piece)], options))
        for work in works:
            yield from finished(work)

    def _combine(self, flat: Tensor, reduction: RankReduction) -> CollectiveSteps:
        """The combination of the leaders' tensors (n,), in place: each leader combines one part of it."""
        hosts, count = len(self._hosts), flat.numel()
        # Host h combines elements count * h // hosts to count * (h + 1) // hosts.
        sizes = [count * (host + 1) // hosts - count * host // hosts for host in range(hosts)]
        parts = flat.split(sizes)
        mine = parts[self._here]
        # [hosts, part]: row h is what host h has for this leader's part.
        found = flat.new_empty(hosts, mine.numel())
        in_bytes = [size * flat.element_size() for size in sizes]
        own = [in_bytes[self._here]] * hosts
        options = dist.AllToAllOptions()
        yield from finished(
            self._leaders.alltoall_base(as_bytes(found), as_bytes(flat), own, in_bytes, options)
        )
        if mine.numel():
            combine_in_order(list(found), reduction.combine, mine)
        # Each leader has one combined part, and sends it to the others.
        yield from self._between_leaders(parts, range(hosts))


class GlooMessages:
    """Messages between two ranks of a group on several hosts, as ``Channels`` has them."""

    def __init__(self, gloo: Any, name: str) -> None:
        self._gloo, self._name = gloo, name
        self._queues: dict[tuple[bool, int], CallQueue] = {}

    def queue(self, sends: bool, other: int) -> CallQueue:
        key = (sends, other)
        if key not in self._queues:
            self._queues[key] = CallQueue(f"lockstep {self._name} {'to' if sends else 'from'} {other}")
        return self._queues[key]

    def send(self, block: Memory, to: int, tag: int) -> CollectiveSteps:
        yield from finished(self._gloo.send([as_bytes(block.flat)], to, tag))

    def receive(self, block: Memory, source: int, tag: int) -> CollectiveSteps:
        yield from finished(self._gloo.recv([as_bytes(block.flat)], source, tag))

    def source_with(self, tag: int) -> int:
        raise UsageError(
            f"Group {self._name} is on several hosts, so a message can only be received from a rank that is "
            "named. Name the rank that sends it (src=)."
        )

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()
