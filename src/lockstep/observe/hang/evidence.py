"""Finds out what this process is doing, from its Python frames and torch's flight recorder.

The recorder's trace is read in its JSON form. The other form is a pickle and brings the line that issued each
collective, but asking for it imports torch's compiler into a process that stands still: seconds, with import locks
that the main thread may hold. So the line is that at which the main thread is now: of the call, or, for a
collective that was issued with ``async_op``, of the wait.

Gloo's records stay in the state "scheduled", and the recorder's own count of what is complete includes sends and
receives, which it does not list. What counts is the flag "retired" and ``collective_seq_id``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch.distributed as dist

from lockstep.observe.hang.processes import waited_s
from lockstep.observe.hang.records import MOST_PENDING, Evidence, PendingCollective
from lockstep.observe.hang.stacks import StackSummary, summarize_stack
from lockstep.shared_memory.history import CallHistory
from lockstep.torch_internals import c10d


def gather_evidence(rank: int, host: str, step: int, idle_s: float, main_thread: int) -> Evidence:
    """Return what this process is doing, seen from another thread than the one named by ``main_thread``.

    Never raises and never touches a device: what cannot be found out is left empty.
    """
    try:
        seen = summarize_stack(main_thread)
    except Exception:
        # Frames change while they are read, and torch's private functions may do anything.
        seen = StackSummary()
    try:
        found = pending_collectives(seen)
    except Exception:
        found = RecordedCollectives()
    return Evidence(
        rank=rank,
        host=host or socket.gethostname(),
        pid=os.getpid(),
        step=step,
        idle_s=idle_s,
        place=seen.place,
        pending=found.pending[:MOST_PENDING],
        completed=found.completed,
        stack=seen.text,
        waits=seen.waits,
        call=seen.call,
        groups=found.groups,
        recent=found.recent,
        waited_s=waited_s(os.getpid()),
    )


RecordedCollective: TypeAlias = Mapping[str, Any]
"""An entry of a flight recorder, as JSON: another torch may have others."""

DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
RECENT = 8


@dataclass(frozen=True)
class RecordedCollectives:
    """Pending collectives, oldest first; the last complete ones; group -> last complete number; group -> ranks."""

    pending: tuple[PendingCollective, ...] = ()
    recent: tuple[PendingCollective, ...] = ()
    completed: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def pending_collectives(seen: StackSummary) -> RecordedCollectives:
    """Return what this process has issued and not completed. Never raises."""
    if not (dist.is_available() and dist.is_initialized()):
        return RecordedCollectives()
    names = c10d.names_of_groups()
    ranks = {name: ranks_of(group) for group, name in names.items()}
    groups = {name: members for name, members in ranks.items() if members}
    entries = [*of_living_groups(recorded(), default_name(names)), *recorded_in_memory(names)]
    completed: dict[str, int] = {}
    pending, recent = [], []
    for entry in entries:
        one = collective(entry, seen, groups)
        if one is None:
            continue
        if not (entry.get("retired") or entry.get("state") == "completed"):
            pending.append(one)
            continue
        recent.append(one)
        if not entry["is_p2p"]:
            completed[one.group] = max(one.number or 0, completed.get(one.group, 0))
    unrecorded = from_stack(seen, names)
    # It may be one that the recorder has listed already.
    if unrecorded is not None and not pending:
        pending.append(unrecorded)
    return RecordedCollectives(tuple(pending), tuple(recent[-RECENT:]), completed, groups)


def recorded() -> list[RecordedCollective]:
    """Return the flight recorders' entries, oldest first; none where this torch has no recorder or it is off."""
    entries: list[RecordedCollective] = []
    for trace in c10d.recorder_traces():
        found = trace.get("entries")
        entries += [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return sorted(entries, key=lambda one: one.get("time_created_ns") or 0)


def recorded_in_memory(names: Mapping[object, str]) -> Iterator[RecordedCollective]:
    """Yield the entries of groups that share memory, which torch's recorders know nothing of."""
    for group in names:
        history = getattr(group, "history", None)
        if isinstance(history, CallHistory):
            yield from history.entries()


def of_living_groups(entries: list[RecordedCollective], main: str) -> list[RecordedCollective]:
    """Leave out calls of destroyed groups, which the recorder remembers. Groups are counted in ``pg_id``: what is older
    than the last main group, or than the last group of its name, is gone."""
    last: dict[str, int] = {}
    for entry in entries:
        name = group_of(entry)
        last[name] = max(last.get(name, -1), entry.get("pg_id", -1))
    oldest = last.get(main, -1)
    return [one for one in entries if one.get("pg_id", -1) >= max(oldest, last[group_of(one)])]


def group_of(entry: RecordedCollective) -> str:
    return str((entry.get("process_group") or [""])[0])


def collective(
    entry: RecordedCollective, seen: StackSummary, groups: Mapping[str, tuple[int, ...]]
) -> PendingCollective | None:
    """Return the entry of a recorder; None: it is none that ranks meet in."""
    try:
        operation, _, pair = str(entry["profiling_name"]).rpartition(":")[2].partition(" ")
        sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
        group, is_p2p = str(entry["process_group"][0]), bool(entry["is_p2p"])
        return PendingCollective(
            operation=operation,
            number=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
            group=group,
            sizes=", ".join(str(one) for one in sizes[:4]) + (", ..." if len(sizes) > 4 else ""),
            dtype=DTYPES.get(dtypes[0], str(dtypes[0])) if dtypes else "",
            place=seen.place if seen.waits else None,
            peer=peer_in(pair, groups.get(group, ())) if is_p2p else None,
        )
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def peer_in(pair: str, ranks: tuple[int, ...]) -> int | None:
    """Return the other global rank in NCCL's "0->1" and "0<-1", which count within the group."""
    other = pair.replace("<-", "->").partition("->")[2]
    return ranks[int(other)] if other.isdigit() and int(other) < len(ranks) else None


def from_stack(seen: StackSummary, names: Mapping[object, str]) -> PendingCollective | None:
    """Return the operation in which the Python stack is, where no recorder knows it: a send on gloo."""
    if not seen.operation:
        return None
    return PendingCollective(
        operation="send/recv" if seen.operation == "wait" else seen.operation,
        number=None,
        group=names.get(seen.group) or (default_name(names) if seen.operation != "wait" else ""),
        sizes="",
        dtype="",
        place=seen.place,
        peer=seen.peer,
    )


def default_name(names: Mapping[object, str]) -> str:
    return names.get(dist.group.WORLD, "")


def ranks_of(group: Any) -> tuple[int, ...]:
    """Global ranks of the group; none if this rank is not in it."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except Exception:
        # A group that is being destroyed.
        return ()
