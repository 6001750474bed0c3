"""What the parts of one training step share, and what the main thread gets done: counters for a side thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

RECENT_STEPS = 50


class StepParts(Protocol):
    """Which part of a step the main thread is in."""

    @property
    def part(self) -> str:
        """The one that it is in."""

    def enter(self, part: str) -> str:
        """Another part begins; returns the one that it was in."""


class StepClock:
    """Counts batches, backward passes and optimizer steps, and finds the boundaries between steps.

    A boundary is the moment at which the loop asks for the next batch after at least one optimizer step: nothing of
    the step before is left to do, and the script's own counters agree with the state. Costs a few attribute writes
    a step; written by the main thread alone.

    ``ticks`` grows with everything that gets done. ``durations_s`` are those of the latest steps, from boundary to
    boundary; ``local_s`` how long each took from its boundary to its backward pass, when other ranks are not waited
    for by plain data parallelism. ``parts``, once there is one, learns in which part of a step the main thread is;
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
        self.parts: StepParts | None = None
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
        # a copy counts, but stops nothing, and nobody looks on
        nobody: dict[str, Any] = {
            "at_boundary": None,
            "parts": None,
            "at_batch": [],
            "at_step": [],
            "at_news": [],
            "latest": None,
        }
        return {**self.__dict__, **nobody}

    def enter(self, part: str) -> str:
        """The main thread begins another part of a step; returns the one that it was in."""
        return "other" if self.parts is None else self.parts.enter(part)

    @property
    def part(self) -> str:
        """Which part of a step the main thread is in; "": nobody notes it."""
        return "" if self.parts is None else self.parts.part

    def batch_wanted(self) -> None:
        """The loop asks a prepared loader for its next batch."""
        self.ticks += 1
        if not self._stepped:
            self._asked = self._asked or time.perf_counter()
        else:
            self._stepped = False
            self.boundary()
        if self.parts is not None:
            self.parts.enter("data")

    def news(self, name: str, /, **values: object) -> None:
        """Something happens to the run."""
        for tell in list(self.at_news):
            tell(name, values)

    def batch_comes(self, batch: object) -> None:
        """A prepared loader hands out this one."""
        for look in self.at_batch:
            look(batch)
        if self.parts is not None:
            self.parts.enter("other")

    def boundary(self) -> None:
        """A step is complete."""
        now = time.perf_counter()
        for tell in self.at_step:
            tell()
        if self._began is not None:
            self.durations_s.append(now - self._began)
            self.local_s.append(self._forward_s)
        self.boundaries += 1
        if self.at_boundary is not None:
            self.at_boundary(self.boundaries)
            now = time.perf_counter()  # what was done there is not part of a step
        self._began = self._asked = now
        self._forward_s = 0.0

    def backward_begins(self) -> None:
        """The forward pass of a micro-batch is done."""
        self.ticks += 1
        if self._asked is not None:
            self._forward_s += time.perf_counter() - self._asked
            self._asked = None
        if self.parts is not None:
            self.parts.enter("backward")

    def stepped(self) -> None:
        """An optimizer made a step."""
        self.ticks += 1
        self.steps += 1
        self._stepped = True

    @property
    def slowest_s(self) -> float:
        """Seconds of the slowest of the latest steps; 0 before there are any."""
        return max(list(self.durations_s), default=0.0)


_CURRENT: ContextVar[StepClock | None] = ContextVar("lockstep_step_clock", default=None)


def keep_time_by(clock: StepClock) -> None:
    """From now on ``waiting_for_ranks`` of this thread tells this clock."""
    _CURRENT.set(clock)


@contextmanager
def waiting_for_ranks() -> Iterator[None]:
    """Around a collective that this thread waits for: its step is in the part "communication" meanwhile.

    Costs 2 µs, and nothing in code that torch compiles.
    """
    clock = None if torch.compiler.is_compiling() else _CURRENT.get()
    part = "" if clock is None else clock.enter("communication")
    try:
        yield
    finally:
        if clock is not None:
            clock.enter(part)


@dataclass(frozen=True)
class BatchCounts:
    """Rows of one global batch, rank by rank.

    ``rows[r]`` is the number of rows that rank ``r`` holds, padding included (0: it has no batch).
    ``real[r]`` is how many of them, counted from the first, are samples; the rest repeat samples
    so that all ranks hold equally many.
    """

    rows: tuple[int, ...]
    real: tuple[int, ...]

    @cached_property
    def total(self) -> int:
        """Number of samples in the global batch."""
        return sum(self.real)


@dataclass(eq=False)
class LoaderProgress:
    """How far one running iteration over a prepared loader is; written by the loader alone.

    ``counts`` is None when the loader cannot know them. ``batches``: of this rank, handed out of this epoch.
    """

    loader: object = None
    batches: int = 0
    end_of_data: bool = False
    counts: BatchCounts | None = None


class OwnProgress(LoaderProgress):
    """How far a loader is that says itself when it ends: one that was not made by ``prepare``."""

    @property
    def end_of_data(self) -> bool:
        return bool(getattr(self.loader, "end_of_dataloader", False))

    @end_of_data.setter
    def end_of_data(self, value: bool) -> None:
        """It is the loader's."""


class PluginKwargs(dict[str, Any]):
    """How windows are counted, by Accelerate's names; a value that is set here is set in the state."""

    def __init__(self, state: StepState) -> None:
        self._state = state
        super().__init__((name, getattr(state, field)) for name, field in PLUGIN_FIELDS.items())

    def __setitem__(self, name: str, value: object) -> None:
        if name in PLUGIN_FIELDS:
            setattr(self._state, PLUGIN_FIELDS[name], value)
        super().__setitem__(name, value)

    def update(self, *args: object, **kwargs: object) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


PLUGIN_FIELDS = {
    "num_steps": "accumulation_steps",
    "adjust_scheduler": "adjust_scheduler",
    "sync_with_dataloader": "sync_with_dataloader",
    "sync_each_batch": "sync_each_batch",
}


class Turns(Protocol):
    """When optimizers step and gradients are cleared, where several batches stand for one."""

    def step(self, optimizer: object, step_if_due: Callable[[], Any]) -> Any:
        """A script asks an optimizer to step; ``step_if_due`` does it where ``sync_gradients`` is true."""

    def clears(self) -> bool:
        """A script asks to clear gradients: whether that is done."""


class StateBeingSaved(Protocol):
    """A state that is copied while training goes on: whoever is about to change it says so, and waits."""

    def before_step(self, optimizer: object) -> None:
        """What this optimizer changes is about to change."""

    def before_backward(self) -> None:
        """Gradients are about to change."""


@dataclass
class StepState:
    """The state of the current step of one ``Accelerator``.

    ``sync_gradients``: this backward ends an accumulation window, so gradients are averaged over
    the ranks and the optimizer steps. ``backward_calls``: in this micro-batch so far. ``stepping``: a prepared
    optimizer is in its step. ``is_in_window``: a micro-batch runs, inside of ``accumulate``. ``virtual_ranks``: this
    process trains on the batches of so many ranks, one after another, so that windows are longer; ``turns`` then says
    when what a script asks for is done. ``being_saved``: the state that a save in the background is about to copy.
    """

    accumulation_steps: int = 1
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    adjust_scheduler: bool = True
    sync_gradients: bool = True
    stepping: bool = False
    micro_batch: int = 0
    backward_calls: int = 0
    is_in_window: bool = False
    clock: StepClock = field(default_factory=StepClock)
    running: list[LoaderProgress] = field(default_factory=list)
    virtual_ranks: int = 1
    turns: Turns | None = None
    being_saved: StateBeingSaved | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "being_saved": None}  # nobody saves the state of a copy

    @property
    def window_length(self) -> int:
        """Micro-batches of this process for each optimizer step."""
        return self.accumulation_steps * self.virtual_ranks

    def begin(self, progress: LoaderProgress) -> None:
        """A prepared loader starts an iteration; the latest to start is the active one."""
        self.running.append(progress)

    def finish(self, progress: LoaderProgress) -> None:
        self.running = [other for other in self.running if other is not progress]

    # The names that scripts written for Accelerate read.

    @property
    def num_steps(self) -> int:
        return self.accumulation_steps

    @property
    def initialized(self) -> bool:
        return True

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """How windows are counted, as the arguments of ``GradientAccumulationPlugin``. What is changed in it holds."""
        return PluginKwargs(self)

    @plugin_kwargs.setter
    def plugin_kwargs(self, values: dict[str, object]) -> None:
        PluginKwargs(self).update(values)

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Always False: there are no XLA devices."""
        return False

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders over which loops run now, the outermost first."""
        return [None, *(progress.loader for progress in self.running)]

    def _add_dataloader(self, dataloader: object) -> None:
        """A loader that is not a prepared one starts an iteration; it has ``end_of_dataloader`` and ``remainder``."""
        self.begin(OwnProgress(dataloader))

    def _remove_dataloader(self, dataloader: object) -> None:
        self.running = [progress for progress in self.running if progress.loader is not dataloader]

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def end_of_dataloader(self) -> bool:
        return self.end_of_data

    @property
    def in_dataloader(self) -> bool:
        return self.active is not None

    @property
    def active_dataloader(self) -> object:
        return self.active.loader if self.active is not None else None

    @property
    def remainder(self) -> int:
        """Samples in the active loader's last, incomplete global batch; 0: none, -1: not known."""
        return int(getattr(self.active_dataloader, "remainder", -1))

    @property
    def active(self) -> LoaderProgress | None:
        return self.running[-1] if self.running else None

    @property
    def end_of_data(self) -> bool:
        """The active loader has handed out its last batch (False outside of any loader)."""
        return self.active is not None and self.active.end_of_data

    @property
    def counts(self) -> BatchCounts | None:
        """Row counts of the active loader's current global batch, where known."""
        return self.active.counts if self.active is not None else None
