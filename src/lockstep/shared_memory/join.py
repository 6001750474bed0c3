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
from lockstep.shared_memory.hosts import GlooMessages, HierarchicalCollectives
from lockstep.shared_memory.segment import GroupLayout, Segment, SegmentAddress
from lockstep.shared_memory.slots import Peers, RankSlots
from lockstep.torch_internals import c10d

_logger = logging.getLogger(__name__)
# Only this kind of processor keeps the order of writes to memory without an instruction that asks for it.
PROCESSOR = "x86_64"
# Ranks of versions that write the segment otherwise do not share one.
FORMAT = 2


def make_group(options: Any) -> object:
    """What torch calls on each rank for a group with this backend.

    Where no two ranks can share memory, for a reason that all of them learn, it is gloo.
    """
    store, rank, ranks = options.store, options.group_rank, options.group_size
    names = list(options.global_ranks_in_group) or list(range(ranks))
    hosts, reason = find_hosts(store, rank, ranks)
    if not reason:
        here = next(index for index, members in enumerate(hosts) if rank in members)
        store_of_host = c10d.PrefixStore(f"host{here}", store)
        peers, failure = share(store_of_host, rank, hosts[here], names, options.timeout)
        # Whether all ranks could map it, before any of them takes the group for one that shares memory.
        reason = next(filter(None, exchange(store, "mapped", rank, ranks, failure)), "")
        wait_for_readers(store, "mapped", rank, ranks)
        if not reason:
            return group_on(hosts, peers, options)
        if peers is not None:
            peers.segment.release()
    if names[rank] == 0 and ranks > 1:
        _logger.info("Ranks %s communicate through gloo, not through shared memory: %s.", names, reason)
    return c10d.gloo_group(c10d.PrefixStore("gloo", store), rank, ranks, options.timeout)


def find_hosts(store: object, rank: int, ranks: int) -> tuple[list[list[int]], str]:
    """The ranks that can share memory, host by host in the order of their first ranks; or why none can."""
    if ranks == 1:
        return [], "it has one rank"
    found = exchange(store, "host", rank, ranks, host_of_process())
    hosts: dict[str, list[int]] = {}
    for other, text in enumerate(found):
        if text.startswith("!"):
            return [], text[1:]
        hosts.setdefault(text, []).append(other)
    return list(hosts.values()), "each of its ranks is on another host" if len(hosts) == ranks else ""


def group_on(hosts: list[list[int]], peers: Peers | None, options: Any) -> SharedMemoryGroup:
    """The group of ranks on these hosts."""
    rank, ranks, name = options.group_rank, options.group_size, str(options.group_id)
    slots = None if peers is None else RankSlots(peers, read_code)
    if peers is not None and slots is not None and len(hosts) == 1:
        return SharedMemoryGroup(rank, ranks, name, peers, HostCollectives(slots), Channels(peers, name))
    # Messages, gather, scatter and all-to-all go from rank to rank, without the leaders.
    everyone = c10d.gloo_group(c10d.PrefixStore("gloo", options.store), rank, ranks, options.timeout)
    first = [members[0] for members in hosts]
    leaders = None
    if rank in first:
        store = c10d.PrefixStore("leaders", options.store)
        leaders = c10d.gloo_group(store, first.index(rank), len(first), options.timeout)
    host = None if slots is None else HostCollectives(slots)
    collectives = HierarchicalCollectives(rank, hosts, host, leaders, everyone)
    return SharedMemoryGroup(rank, ranks, name, peers, collectives, GlooMessages(everyone, name))


def exchange(store: Any, key: str, rank: int, ranks: int, text: str) -> list[str]:
    """What every rank says under this key."""
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


def share(
    store: Any, rank: int, members: Sequence[int], names: Sequence[int], timeout: timedelta
) -> tuple[Peers | None, str]:
    """Map one segment on all ranks of a host; None if there is one rank, or with the reason why this one could not."""
    if len(members) == 1:
        return None, ""
    layout, place = GroupLayout(len(members)), members.index(rank)
    try:
        if place == 0:
            segment = Segment.create(layout.size)
            store.set("segment", segment.address.text())
        else:
            segment = Segment.open(SegmentAddress.from_text(bytes(store.get("segment")).decode()))
    except (OSError, ValueError) as error:
        # The others wait for this key, and would wait until the timeout.
        if place == 0:
            store.set("segment", "")
        return None, f"rank {names[rank]} could not map shared memory ({error})"
    return Peers(segment, layout, place, [names[other] for other in members], timeout.total_seconds()), ""
