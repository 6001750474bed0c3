"""What the main thread gets done, for side threads: counted steps, and the part of a step that it is in."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

RECENT_STEPS = 50

PARTS = (
    "data",
    "to_device",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "save",
    "wait",
    "inference",
    "other",
)
"""Waiting for a batch; moving it; training forwards and what follows until backward; backward; collectives that the
main thread waits for; optimizers, their clipping and clearing; checkpoints; ``wait_for_everyone``; calls of prepared
models without gradients; what is left, which is the script's own."""


class Parts:
    """Seconds in each part since this was made, as the main thread sees them.

    Belongs to the main thread. ``enter`` takes 0.3 µs. ``at_enter`` is called with each part that begins.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._part = "other"
        self._since = now()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self.at_enter: Callable[[str], None] | None = None

    @property
    def part(self) -> str:
        """In which it is now. May be asked by any thread."""
        return self._part

    def enter(self, part: str) -> str:
        """Enter a part. Returns the one before."""
        now = self._now()
        before = self._part
        self._seconds[before] += now - self._since
        self._since = now
        self._part = part
        if self.at_enter is not None:
            self.at_enter(part)
        return before

    def read(self) -> dict[str, float]:
        """Return seconds in each part until now."""
        now = self._now()
        self._seconds[self._part] += now - self._since
        self._since = now
        return dict(self._seconds)

    def read_entered(self) -> dict[str, float]:
        """Return seconds in each part until the one that it is in now began."""
        return dict(self._seconds)


def difference(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Return seconds in each part between two readings; parts that took none are left out."""
    return {part: seconds - before[part] for part, seconds in now.items() if seconds > before[part]}


class StepClock:
    """Counts batches, backward passes and optimizer steps, and finds the boundaries between steps.

    A boundary is the moment at which the loop asks for the next batch after at least one optimizer step: nothing of
    the step before is left to do, and the script's own counters agree with the state. Costs a few attribute writes
    a step; written by the main thread alone.

    ``ticks`` grows with everything that gets done. ``durations_s`` are those of the latest steps, from boundary to
    boundary; ``local_s`` how long each took from its boundary to its backward pass, when other ranks are not waited
    for by plain data parallelism. ``parts`` know in which part of a step the main thread is, and ``enter`` is theirs.
    ``at_batch`` is called with each batch that a prepared loader hands out, ``at_step`` at each boundary.
    ``own`` are numbers of this rank's latest step, which the watch tells; ``others``, on rank 0, what it has heard of
    the other ranks'. ``at_news`` is called with the name and values of what happens to the run, by any thread.
    ``latest``, on rank 0, gives numbers of the latest step for people who look on; a side thread calls it.
    """

    def __init__(self) -> None:
        self.ticks = 0
        self.steps = 0
        self.boundaries = 0
        self.durations_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self.local_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self.at_boundary: Callable[[int], None] | None = None
        self.keep_parts(Parts())
        self.at_batch: list[Callable[[object], None]] = []
        self.at_step: list[Callable[[], None]] = []
        self.at_news: list[Callable[[str, Mapping[str, object]], None]] = []
        self.own: Mapping[str, float] = {}
        self.others: Mapping[str, Any] = {}
        self.latest: Callable[[], Mapping[str, float]] | None = None
        self._stepped = False
        self._began: float | None = None
        self._forward_s = 0.0
        self._asked: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy counts, but stops nothing, and nobody looks on.
        nobody: dict[str, Any] = {
            "at_boundary": None,
            "at_batch": [],
            "at_step": [],
            "at_news": [],
            "latest": None,
        }
        state = {**self.__dict__, **nobody}
        del state["parts"], state["enter"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.keep_parts(Parts())

    def keep_parts(self, parts: Parts) -> None:
        """Tell these from now on in which part of a step the main thread is."""
        self.parts = parts
        # Called ten times a step: without a call in between.
        self.enter = parts.enter

    def batch_wanted(self) -> None:
        """Note that the loop asks a prepared loader for its next batch."""
        self.ticks += 1
        if not self._stepped:
            # Several batches may be asked for before one backward: the time runs from the first.
            self._asked = self._asked or time.perf_counter()
        else:
            self._stepped = False
            self.boundary()
        self.enter("data")

    def news(self, name: str, /, **values: object) -> None:
        """Something happens to the run."""
        for tell in list(self.at_news):
            tell(name, values)

    def batch_comes(self, batch: object) -> None:
        """Note that a prepared loader hands out this batch."""
        for look in [*self.at_batch]:
            look(batch)
        self.enter("other")

    def boundary(self) -> None:
        """Note that a step is complete."""
        now = time.perf_counter()
        # A copy, as one may be taken out meanwhile: of an Accelerator that nobody holds any more.
        for tell in [*self.at_step]:
            tell()
        if self._began is not None:
            self.durations_s.append(now - self._began)
            self.local_s.append(self._forward_s)
        self.boundaries += 1
        if self.at_boundary is not None:
            self.at_boundary(self.boundaries)
            # What was done there is not part of a step.
            now = time.perf_counter()
        self._began = self._asked = now
        self._forward_s = 0.0

    def backward_begins(self) -> None:
        """Note that the forward pass of a micro-batch is done."""
        self.ticks += 1
        if self._asked is not None:
            self._forward_s += time.perf_counter() - self._asked
            self._asked = None
        self.enter("backward")

    def stepped(self) -> None:
        """Note that an optimizer made a step."""
        self.ticks += 1
        self.steps += 1
        self._stepped = True

    @property
    def slowest_s(self) -> float:
        """Seconds of the slowest of the latest steps; 0 before there are any."""
        return max(list(self.durations_s), default=0.0)


_CURRENT: ContextVar[StepClock | None] = ContextVar("lockstep_step_clock", default=None)


def keep_time_by(clock: StepClock) -> None:
    """Let ``waiting_for_ranks`` of this thread tell this clock from now on."""
    _CURRENT.set(clock)


@contextmanager
def waiting_for_ranks() -> Iterator[None]:
    """Surround a collective that this thread waits for: its step is in the part "communication" meanwhile.

    Costs 2 µs, and nothing in code that torch compiles.
    """
    clock = None if torch.compiler.is_compiling() else _CURRENT.get()
    part = "" if clock is None else clock.enter("communication")
    try:
        yield
    finally:
        if clock is not None:
            clock.enter(part)
