"""Calls of torch.distributed in the user's code, compared across the group's ranks before they run.

Where ranks enter different collectives, or one collective with different sizes or dtypes, gloo waits for ever, ends
with "connection closed by peer" on some of them, or returns wrong numbers. Here all of them raise instead, and say
what each rank called on which line.

Every rank lays down a record of 512 bytes about its call in the main group's store, and reads those of the others of
its group. So neither the numbers of the group's collectives nor what a ``CommCounter`` counts change, a rank
that is in another collective meanwhile is not disturbed, and waiting can have a limit.
"""

from __future__ import annotations

import functools
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.call_record import (
    SIGNATURES,
    CallRecord,
    CheckedCall,
    Signature,
    checked_call,
    splits_fit,
    tensors_in,
)
from lockstep.errors import CollectiveMismatchError
from lockstep.torch_internals import c10d
from lockstep.torch_internals.dispatch import WithoutCollectives

ASYNC_LIMIT_S = 1.0
# As long as a store can wait: 2^31 ms.
FOR_EVER = timedelta(days=20)
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 5e-3
LIBRARIES = ("torch", "lockstep")
CPU = torch.device("cpu")


class CallCheck:
    """Compares the user's collectives across ranks while it is installed.

    Calls of torch and of Lockstep themselves are let through, and so are those in compiled code, in groups of one,
    with fake tensors, and through names that were imported (``from torch.distributed import all_reduce``) before
    ``install``. An asynchronous call waits for those of the other ranks for up to a second; if they do not come, since
    the ranks do other things first, it is issued, and compared when its handle is waited for.

    Args:
        cuda: Compare collectives of tensors on other devices than the CPU too: each then holds up the host until all
            ranks have reached it.
    """

    def __init__(self, cuda: bool = False) -> None:
        self._cuda = cuda
        self._originals: dict[str, Callable[..., object]] = {}
        self._checked: dict[str, Callable[..., object]] = {}
        self._unequal_lines: set[str] = set()
        self._record_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, CallRecordStore] = (
            weakref.WeakKeyDictionary()
        )
        self._stores: weakref.WeakKeyDictionary[object, c10d.Store] = weakref.WeakKeyDictionary()

    @property
    def is_installed(self) -> bool:
        return bool(self._originals)

    def install(self) -> None:
        """Compare from now on. Holds no collective; all ranks do it between the same two of their collectives."""
        if self.is_installed:
            return
        for name, signature in SIGNATURES.items():
            original = getattr(dist, name, None)
            if original is not None:
                self._originals[name] = original
                self._checked[name] = self._with_check(signature, name, original)
                setattr(dist, name, self._checked[name])

    def uninstall(self) -> None:
        """Let calls through again. A function that somebody else has wrapped meanwhile stays as they made it."""
        originals, self._originals = self._originals, {}
        for name, original in originals.items():
            if getattr(dist, name) is self._checked[name]:
                setattr(dist, name, original)
        self._checked = {}

    def _with_check(
        self, signature: Signature, name: str, original: Callable[..., Any]
    ) -> Callable[..., object]:
        @functools.wraps(original)
        def call(*args: object, **kwargs: object) -> object:
            # Without originals it is uninstalled: a script may have imported this wrapper before.
            if torch.compiler.is_compiling() or not self._originals or WithoutCollectives.is_active():
                return original(*args, **kwargs)
            caller = sys._getframe(1)
            if is_library(caller):
                return original(*args, **kwargs)
            given = dict(zip(signature.names, args, strict=False)) | kwargs
            group = self._compared_group(given)
            if group is None:
                return original(*args, **kwargs)
            mine = checked_call(signature, signature.name or name, given, group, caller)
            record_store = self._record_store_of(group)
            number = record_store.begin(mine)
            if mine.is_async and not self._comes_soon(mine, record_store, number):
                work = original(*args, **kwargs)
                late = replace(mine, is_issued=True)
                return CheckedWork(work, lambda: self._compare(late, record_store, number))
            self._compare(mine, record_store, number)
            return original(*args, **kwargs)

        return call

    def _comes_soon(self, call: CheckedCall, record_store: CallRecordStore, number: int) -> bool:
        """Whether all ranks issue this asynchronous call at about the same time, as they mostly do.

        Where they have more to do before, perhaps with each other, nobody may wait for them here: the call is then
        compared when its handle is waited for, and from now on that is so for all calls of this line.
        """
        if call.line in self._unequal_lines:
            return record_store.is_complete(number)
        is_here = record_store.comes_within(number, ASYNC_LIMIT_S)
        if not is_here:
            self._unequal_lines.add(call.line)
        return is_here

    def _compare(self, call: CheckedCall, record_store: CallRecordStore, number: int) -> None:
        thread = threading.get_ident()
        _compared_by[thread] = call
        try:
            records = record_store.records(number)
        finally:
            del _compared_by[thread]
        if len({record.digest for record in records.values()}) > 1 or not splits_fit(list(records.values())):
            raise mismatch(records)

    def _record_store_of(self, group: dist.ProcessGroup) -> CallRecordStore:
        if group not in self._record_stores:
            world = dist.group.WORLD
            if world not in self._stores:
                self._stores[world] = store_of_its_own()
            self._record_stores[group] = CallRecordStore(self._stores[world], group)
        return self._record_stores[group]

    def _compared_group(self, given: Mapping[str, object]) -> dist.ProcessGroup | None:
        """The process group of the call; None where the call is not to be compared."""
        group = given.get("group") or dist.group.WORLD
        if group == dist.GroupMember.NON_GROUP_MEMBER or not isinstance(group, dist.ProcessGroup):
            return None
        if group.size() < 2 or "fake" in dist.get_backend(group):
            return None
        tensors = [one for value in given.values() for one in tensors_in(value)]
        if any(type(one).__name__ == "FakeTensor" for one in tensors):
            return None
        is_cpu = all(one.device.type == "cpu" for one in tensors) if tensors else has_cpu(group)
        return group if is_cpu or self._cuda else None


_compared_by: dict[int, CheckedCall] = {}


def compared_by(thread: int) -> CheckedCall | None:
    """The call that the thread with this identifier is comparing with those of the other ranks; None: it is not.

    For the hang watch, which asks it about a thread that stands still.
    """
    return _compared_by.get(thread)


class CheckedWork(dist.Work):
    """The handle of an asynchronous collective; ``wait`` compares the ranks' calls first."""

    def __init__(self, work: dist.Work, compare: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._compare: Callable[[], None] | None = compare

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        compare, self._compare = self._compare, None
        if compare is not None:
            compare()
        return self._work.wait(*args, **kwargs)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def source_rank(self) -> int:
        return int(self._work.source_rank())

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._work.get_future()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()


class CallRecordStore:
    """The calls of one process group, and the store in which its ranks lay down their records of them.

    Call ``n`` of every rank gives one set of records. Each record says how many sets its rank has read, in order;
    what all ranks have read is deleted.
    """

    def __init__(self, store: c10d.Store, group: dist.ProcessGroup) -> None:
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)
        # It takes bytes as well, whatever its stub says.
        self._store: Any = store
        self._me = dist.get_rank()
        name = f"lockstep/calls/{group.group_name}"
        # The store may outlive a group, and hold what was laid down in an earlier one of this name.
        self._prefix = f"{name}/{store.add(f'{name}/rank {self._me}', 1)}"
        self._begun = 0
        self._read = 0
        self._read_early: set[int] = set()
        self._deleted = 0

    def begin(self, call: CheckedCall) -> int:
        """Lay down this rank's record; returns the number of the call."""
        self._begun += 1
        self._store.set(self._key(self._begun, self._me), struct.pack(">q", self._read) + call.record())
        return self._begun

    def is_complete(self, number: int) -> bool:
        return bool(self._store.check(self._keys(number)))

    def comes_within(self, number: int, limit_s: float) -> bool:
        """Whether all records are there within the limit."""
        deadline = time.monotonic() + limit_s
        pause_s = SHORTEST_PAUSE_S
        while not self.is_complete(number):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return True

    def records(self, number: int) -> dict[int, CallRecord]:
        """Global rank -> its record, once all are there. How long that may take is for the hang watch to say."""
        values = [bytes(one) for one in self._store.multi_get(self._keys(number))]
        self._has_read(number)
        self._delete_until(min(struct.unpack(">q", one[:8])[0] for one in values))
        return {rank: CallRecord.from_bytes(one[8:]) for rank, one in zip(self.ranks, values, strict=True)}

    def _has_read(self, number: int) -> None:
        # Handles may be waited for in another order than they were made: what is read may not have gaps.
        self._read_early.add(number)
        while self._read + 1 in self._read_early:
            self._read += 1
            self._read_early.remove(self._read)

    def _delete_until(self, number: int) -> None:
        while self._deleted < number:
            self._deleted += 1
            self._store.delete_key(self._key(self._deleted, self._me))

    def _keys(self, number: int) -> list[str]:
        return [self._key(number, rank) for rank in self.ranks]

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"


def store_of_its_own() -> c10d.Store:
    """A connection to the main group's store that may wait without holding up others who use the store."""
    store = c10d.default_store()
    if not hasattr(store, "clone"):
        return store
    own = store.clone()
    own.set_timeout(FOR_EVER)
    return own


def mismatch(records: Mapping[int, CallRecord]) -> CollectiveMismatchError:
    names = {record.text.partition("(")[0] for record in records.values()}
    lines = "".join(f"\n  rank {rank}: {record.text}" for rank, record in records.items())
    if len(names) > 1:
        what, advice = "different collectives", "Make every rank take the same path to its collectives."
    else:
        what = f"{names.pop()} with arguments that do not belong together"
        advice = (
            "Pass tensors with the same number of elements and dtype, and the same settings, on every rank."
        )
    return CollectiveMismatchError(f"The ranks called {what}:{lines}\n{advice}")


def is_library(caller: FrameType) -> bool:
    name = caller.f_globals.get("__name__")
    return isinstance(name, str) and name.partition(".")[0] in LIBRARIES


def has_cpu(group: dist.ProcessGroup) -> bool:
    """Whether the group communicates CPU tensors."""
    return c10d.has_backend_for(group, CPU)
