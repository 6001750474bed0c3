"""Making a group: which ranks share a host, and what is used where they cannot share memory."""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lockstep.shared_memory.algorithms import HostCollectives
from lockstep.shared_memory.call_code import read_code
from lockstep.shared_memory.channel import Channels
from lockstep.shared_memory.group import SharedMemoryGroup
from lockstep.shared_memory.segment import GroupLayout, Segment, SegmentAddress
from lockstep.shared_memory.slots import Peers, RankSlots
from lockstep.torch_internals import c10d

_logger = logging.getLogger(__name__)
# Only this kind of processor keeps the order of writes to memory without an instruction that asks for it.
PROCESSOR = "x86_64"
# Ranks of versions that write the segment otherwise do not share one.
FORMAT = 2


def make_group(options: Any) -> object:
    """Make a group with this backend, as torch calls it on each rank.

    Where the ranks cannot share memory, for a reason that all of them learn, it is gloo.
    """
    store, rank, ranks = options.store, options.group_rank, options.group_size
    names = list(options.global_ranks_in_group) or list(range(ranks))
    reason = why_not_shared(store, rank, ranks)
    if not reason:
        peers, failure = share(c10d.PrefixStore("host", store), rank, names, options.timeout)
        # Whether all ranks could map it, before any of them takes the group for one that shares memory.
        reason = next(filter(None, exchange(store, "mapped", rank, ranks, failure)), "")
        wait_for_readers(store, "mapped", rank, ranks)
        if peers is not None and not reason:
            name = str(options.group_id)
            collectives = HostCollectives(RankSlots(peers, read_code))
            return SharedMemoryGroup(rank, ranks, name, peers, collectives, Channels(peers, name))
        if peers is not None:
            peers.segment.release()
    if names[rank] == 0 and ranks > 1:
        _logger.info("Ranks %s communicate through gloo, not through shared memory: %s.", names, reason)
    return c10d.gloo_group(c10d.PrefixStore("gloo", store), rank, ranks, options.timeout)


def why_not_shared(store: object, rank: int, ranks: int) -> str:
    """Return why the ranks cannot share memory, or "" if they can."""
    if ranks == 1:
        return "it has one rank"
    found = exchange(store, "host", rank, ranks, host_of_process())
    failed = next((text[1:] for text in found if text.startswith("!")), "")
    return failed or ("its ranks are on several hosts" if len(set(found)) > 1 else "")


def exchange(store: Any, key: str, rank: int, ranks: int, text: str) -> list[str]:
    """Return what every rank says under this key."""
    store.set(f"{key}/{rank}", text)
    keys = [f"{key}/{other}" for other in range(ranks)]
    return [bytes(value).decode() for value in store.multi_get(keys)]


def wait_for_readers(store: Any, key: str, rank: int, ranks: int) -> None:
    """Keep the first rank, whose process may serve the store, until every rank has read what they exchanged."""
    if rank == 0:
        store.wait([f"{key}/read/{other}" for other in range(1, ranks)])
    else:
        store.set(f"{key}/read/{rank}", "")


def why_not() -> str:
    """Why this machine cannot share memory between ranks; "" if it can."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if platform.machine() != PROCESSOR:
        return f"it is proven on {PROCESSOR} processors only, and this is {platform.machine()}"
    return ""


def host_of_process() -> str:
    """Equal for processes that can open each other's memory; "!" and why, where none can."""
    why = why_not()
    if why:
        return "!" + why
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = os.stat("/proc/self/ns/pid").st_ino
        Segment.create(4096).release()
        c10d.group_that_does_nothing(0, 1, "probe")
    except (OSError, AttributeError) as error:
        return f"!this system gives no anonymous shared memory ({error})"
    except (TypeError, RuntimeError) as error:
        return f"!torch {torch.__version__} has other process groups than this version of Lockstep knows ({error})"
    # Processes of another boot, another namespace or another user could not open each other's descriptors.
    return f"{socket.gethostname()} {boot} {numbers} {os.getuid()} {FORMAT}"


def share(store: Any, rank: int, names: Sequence[int], timeout: timedelta) -> tuple[Peers | None, str]:
    """Map one segment on all ranks. Return None with the reason where this one could not."""
    layout = GroupLayout(len(names))
    try:
        if rank == 0:
            segment = Segment.create(layout.size)
            store.set("segment", segment.address.text())
        else:
            segment = Segment.open(SegmentAddress.from_text(bytes(store.get("segment")).decode()))
    except (OSError, ValueError) as error:
        # The others wait for this key, and would wait until the timeout.
        if rank == 0:
            store.set("segment", "")
        return None, f"rank {names[rank]} could not map shared memory ({error})"
    return Peers(segment, layout, rank, list(names), timeout.total_seconds()), ""
