"""Where the ranks of one host lay down what the others read: two slots for each rank, used in turns.

All ranks of a group run the same collectives in the same order, each as a row of chunks. For a chunk a rank copies
into its slot, arrives (its counter goes up by one), waits until all counters are as high as its own, and reads the
slots of the others. The next chunk goes into the other slot. A slot is written again two chunks later: by then all
ranks have arrived at the chunk between, and so are done with reading. One wait for a chunk is enough.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from lockstep.errors import CollectiveMismatchError, DifferentCallsError
from lockstep.shared_memory.futex import Futex
from lockstep.shared_memory.segment import ABORTED, CALLS, SIZES, TOKEN_BYTES, GroupLayout, Segment
from lockstep.user_call import UserCall, in_different_calls, user_call

# A rank that waits longer than this looks whether the others live.
LOOK_AFTER_S = 0.1
SPIN_S = 50e-6
# What ranks tell each other of calls that differ, and how long they wait for that.
TOLD_BYTES = 512
TELL_LIMIT_S = 10.0

CollectiveSteps = Iterator["Waitable"]
"""A collective as a row of steps: it gives what it waits for, and is continued when that is there."""


class Waitable:
    """Something that other ranks bring about."""

    def is_there(self) -> bool:
        raise NotImplementedError

    def wait(self, deadline: float) -> None:
        raise NotImplementedError


class Peers:
    """Who takes part, whether they live, and waiting for what they write.

    Args:
        names: Of each rank of the group on this host, its number for people.
        timeout_s: How long one wait may last.
    """

    def __init__(
        self, segment: Segment, layout: GroupLayout, rank: int, names: Sequence[int], timeout_s: float
    ) -> None:
        assert layout.slots >= TOKEN_BYTES
        # The token lies in the first line, which no rank's words use.
        self.segment, self.layout = segment, layout
        self.rank, self.names, self.timeout_s = rank, names, timeout_s
        self.words = memoryview(segment.memory)[: layout.slots].cast("Q")
        self.futex = Futex()
        # More ranks than cores: whoever spins keeps another from what it is waited for.
        self.spin_s = SPIN_S if layout.ranks <= len(os.sched_getaffinity(0)) else 0.0
        self.doing: Callable[[], str] = lambda: "a collective"
        segment.hold(rank)

    def publish(self, index: int, value: int) -> None:
        """Write a word and wake those who wait for it."""
        self.words[index] = value
        self.futex.wake(self.segment.base + 8 * index)

    def await_word(
        self, words: memoryview, base: int, index: int, least: int, rank: int, deadline: float
    ) -> None:
        """Wait until a word of the memory at ``base``, which ``rank`` writes, is at least so high.

        Raises:
            RuntimeError: a rank has ended, the group was aborted, or time is up.
        """
        if self.spin_s:
            end = time.perf_counter() + self.spin_s
            while time.perf_counter() < end:
                if words[index] >= least:
                    return
        started = time.monotonic()
        deadline = deadline or started + self.timeout_s
        address = base + 8 * index
        while (value := words[index]) < least:
            # The kernel sleeps only while the word is still ``value``: no write since then is missed.
            self.futex.wait(address, value, LOOK_AFTER_S)
            now = time.monotonic()
            if now - started > LOOK_AFTER_S and words[index] < least:
                self.check(rank, lambda: words[index] < least)
                if now > deadline:
                    raise RuntimeError(
                        f"Timed out after {now - started:.0f} s in {self.doing()}: rank {self.names[rank]} did "
                        "not call it. Look at what that rank does, or raise the timeout of the process group."
                    )

    def check(self, awaited: int, is_missing: Callable[[], bool]) -> None:
        """Raise if the group was left or aborted, or a rank that is needed has ended.

        Args:
            awaited: The rank that is waited for.
            is_missing: Whether what it is to bring about is not there.
        """
        if self.segment.is_released:
            raise RuntimeError(f"This process has left the process group before {self.doing()} was done.")
        for rank, name in enumerate(self.names):
            if rank == self.rank:
                continue
            line = self.layout.word(rank)
            if self.words[line + ABORTED]:
                raise RuntimeError(f"Rank {name} aborted the process group.")
            if self.segment.is_held(rank):
                continue
            # Only now, as it may have done its part just before it ended. Who is not behind has done it.
            behind = self.words[line] < self.words[self.layout.word(self.rank)]
            if behind or (rank == awaited and is_missing()):
                raise RuntimeError(
                    f"Rank {name} has ended, while rank {self.names[self.rank]} waits for it in {user_call()}, that is "
                    f"{self.doing()}. Make this call on every rank, or see why rank {name} ended before it."
                )

    def abort(self) -> None:
        self.publish(self.layout.word(self.rank) + ABORTED, 1)


class RankSlots(Waitable):
    """One rank's way to the slots of its group on this host. ``describe``: the code of a call, for people."""

    def __init__(self, peers: Peers, describe: Callable[[int], str]) -> None:
        self.peers, self._describe = peers, describe
        self.rank, self.ranks = peers.rank, peers.layout.ranks
        self.slot_bytes = peers.layout.slot_bytes
        self._words = peers.words
        self._line = peers.layout.word(self.rank)
        self._others = [(rank, peers.layout.word(rank)) for rank in range(self.ranks) if rank != self.rank]
        self._wake, self._wake_address = peers.futex.wake, peers.segment.base + 8 * self._line
        self._count = 0
        self._parity = 0
        self._call = 0
        self._addresses = [
            [peers.segment.base + peers.layout.slot(rank, parity) for rank in range(self.ranks)]
            for parity in (0, 1)
        ]
        self._here = self._addresses[0]
        self._typed: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def begin_chunk(self, call: int, size: int = 0) -> None:
        """Take the other slot, for a chunk of this call, whose code must be that of all ranks."""
        self._parity ^= 1
        self._here = self._addresses[self._parity]
        self._call = call
        # Before ``arrive``: writes stay in order on x86-64, so whoever sees the counter sees these.
        self._words[self._line + CALLS + self._parity] = call
        self._words[self._line + SIZES + self._parity] = size

    def put(self, source: int, size: int, offset: int = 0) -> None:
        """Copy so many bytes from an address into the own slot."""
        ctypes.memmove(self._here[self.rank] + offset, source, size)

    def take(self, rank: int, target: int, size: int, offset: int = 0) -> None:
        """Copy so many bytes from a rank's slot to an address."""
        ctypes.memmove(target, self._here[rank] + offset, size)

    def typed(self, rank: int, dtype: torch.dtype, start: int, end: int) -> Tensor:
        """Elements of a rank's slot, as a tensor on that memory; (end - start,)."""
        key = (self._parity, rank, dtype)
        whole = self._typed.get(key)
        if whole is None:
            layout = self.peers.layout
            whole = self._typed[key] = torch.frombuffer(
                self.peers.segment.memory,
                dtype=dtype,
                count=self.slot_bytes // dtype.itemsize,
                offset=layout.slot(rank, self._parity),
            )
        return whole[start:end]

    def arrive(self) -> RankSlots:
        """Say that this rank is as far as this; what comes next waits for the others."""
        self._count += 1
        self._words[self._line] = self._count
        self._wake(self._wake_address)
        return self

    @property
    def count(self) -> int:
        """How often this rank has arrived."""
        return self._count

    def is_there(self) -> bool:
        words, count = self._words, self._count
        return all(words[line] >= count for _, line in self._others)

    def wait(self, deadline: float) -> None:
        self.await_count(self._count, deadline)

    def await_count(self, count: int, deadline: float = 0.0) -> None:
        """Wait until all ranks have arrived so often."""
        words = self._words
        for rank, line in self._others:
            if words[line] < count:
                self.peers.await_word(words, self.peers.segment.base, line, count, rank, deadline)

    def check_calls(self) -> None:
        """Compare what the ranks are doing.

        Raises:
            DifferentCallsError: on every rank, if they called different collectives in different lines of the script.
            CollectiveMismatchError: the same, within one line.
        """
        words, mine = self._words, self._call
        # A rank that is one chunk ahead already has written its next call at the other parity.
        if any(words[line + CALLS + self._parity] != mine for _, line in self._others):
            calls = [words[self.peers.layout.word(rank) + CALLS + self._parity] for rank in range(self.ranks)]
            if sentence := in_different_calls(self._calls_of_users()):
                raise DifferentCallsError(sentence)
            lines = "".join(
                f"\n  rank {name}: {self._describe(call)}"
                for name, call in zip(self.peers.names, calls, strict=True)
            )
            raise CollectiveMismatchError(
                f"The ranks called different collectives (here by {user_call()}):{lines}\nMake every "
                "rank call the same collectives in the same order, with tensors of the same size and dtype."
            )

    def check_sizes(self) -> int:
        """Compare what each rank of an all-to-all sends to another with what that one takes; returns the most bytes.

        Raises:
            CollectiveMismatchError: on every rank, if they differ.
        """
        rows = [self.typed(rank, torch.int64, 0, 2 * self.ranks).tolist() for rank in range(self.ranks)]
        for (source, sender), (target, receiver) in product(enumerate(self.peers.names), repeat=2):
            sent, taken = rows[source][target], rows[target][self.ranks + source]
            if sent != taken:
                raise CollectiveMismatchError(
                    f"all_to_all ({user_call().line}): rank {sender} sends {sent} bytes to rank {receiver}, which "
                    f"takes {taken}. Give both the same split sizes and dtype."
                )
        return max(map(max, rows))

    def _calls_of_users(self) -> dict[int, UserCall]:
        """Return what each rank's script has called: all have seen that they differ, and exchange one more chunk."""
        mine = ctypes.create_string_buffer("\n".join(user_call()).encode()[:TOLD_BYTES], TOLD_BYTES + 1)
        self.begin_chunk(0)
        self.put(ctypes.addressof(mine), TOLD_BYTES)
        try:
            self.arrive().wait(time.monotonic() + TELL_LIMIT_S)
        except RuntimeError:
            # A rank has ended meanwhile.
            return {}
        told = (ctypes.string_at(address, TOLD_BYTES) for address in self._here)
        texts = [one.rstrip(b"\0").decode(errors="replace").partition("\n") for one in told]
        names = zip(self.peers.names, texts, strict=True)
        return {rank: UserCall(name, line) for rank, (name, _, line) in names}

    def sizes(self) -> list[int]:
        """Return what each rank gave as the size of its chunk."""
        layout = self.peers.layout
        return [self._words[layout.word(rank) + SIZES + self._parity] for rank in range(self.ranks)]
