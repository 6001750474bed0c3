"""Seconds of a step's parts on a CUDA device, where the host runs ahead of it: by events, for which nobody waits."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from lockstep.runtime.clock import Parts

EVERY = 50
"""Of so many steps one is measured: an event costs the host some microseconds."""
MOST_MARKS = 1000
"""Parts that follow each other in a step; what comes then is taken for the last of them."""


class DeviceParts:
    """An event where each part of a step begins, in the stream that is current there.

    What the device does between two of them, and what it waits for, is that part's.

    Args:
        parts: Tell which part begins.
        new_event: Makes what ``torch.cuda.Event(enable_timing=True)`` makes.
    """

    def __init__(self, parts: Parts, new_event: Callable[[], Any]) -> None:
        self._parts = parts
        self._new_event = new_event
        self._steps = 0
        self._marks: list[tuple[str, object]] = []
        self._on_their_way: deque[list[tuple[str, Any]]] = deque(maxlen=8)

    def step_ends(self) -> dict[str, float] | None:
        """The main thread is at the boundary of a step. Seconds by part, and ``total``, of the latest step whose events
        have come since; None: there is none."""
        if self._parts.at_enter is not None:
            self._parts.at_enter = None
            self._mark("")
            self._on_their_way.append(self._marks)
        # The first step is like no other.
        if self._steps % EVERY == 1:
            self._marks = []
            self._mark(self._parts.part)
            self._parts.at_enter = self._enter
        self._steps += 1
        found = None
        # Events come in their order: with the last one of a step all before it are there.
        while self._on_their_way and self._on_their_way[0][-1][1].query():
            found = seconds_between(self._on_their_way.popleft())
        return found

    def _enter(self, part: str) -> None:
        if part != self._marks[-1][0] and len(self._marks) < MOST_MARKS:
            self._mark(part)

    def _mark(self, part: str) -> None:
        event = self._new_event()
        event.record()
        self._marks.append((part, event))


def seconds_between(marks: list[tuple[str, Any]]) -> dict[str, float]:
    """Each part from its events to those that follow; the last mark only ends the one before it."""
    found: dict[str, float] = {}
    for (part, begins), (_, ends) in itertools.pairwise(marks):
        found[part] = found.get(part, 0.0) + begins.elapsed_time(ends) / 1e3
    found["total"] = sum(found.values())
    return found


def device_parts_of(device: torch.device, parts: Parts) -> DeviceParts | None:
    """None where the host does not run ahead, or events do not tell the time."""
    if device.type != "cuda":
        return None
    return DeviceParts(parts, lambda: torch.cuda.Event(enable_timing=True))
