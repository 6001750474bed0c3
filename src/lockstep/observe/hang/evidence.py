"""Finds out what this process is doing, from its Python frames and torch's flight recorder."""

from __future__ import annotations

import os
import socket

from lockstep.observe.hang.pending import RecordedCollectives, pending_collectives
from lockstep.observe.hang.records import MOST_PENDING, Evidence
from lockstep.observe.hang.stacks import StackSummary, look_at


def gather_evidence(rank: int, host: str, step: int, idle_s: float, main_thread: int) -> Evidence:
    """What this process is doing, seen from another thread than the one named by ``main_thread``.

    Never raises and never touches a device: what cannot be found out is left empty.
    """
    try:
        seen = look_at(main_thread)
    except Exception:  # frames change while they are read, and torch's private functions may do anything
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
    )
