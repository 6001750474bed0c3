"""What the parts of one training step share: its place in a window and in its loader."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from lockstep.errors import UsageError
from lockstep.runtime.clock import StepClock

logger = logging.getLogger(__name__)


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


MOST_READ_AHEAD = 2
"""Batches that scripts read ahead of the one that they train on."""


@dataclass
class Resumption:
    """How a script goes on behind a loaded position, until it trains: whether it skips by itself what is behind it.

    ``behind`` batches are, and the script has ``taken`` some since. ``left_over`` is how many of these were the rest of
    the epoch (None: it still has some).
    """

    behind: int
    rank: int
    taken: int = 0
    left_over: int | None = None
    is_settled: bool = False

    def settle(self) -> None:
        """Note that the script trains on the batch that it took last.

        Raises:
            UsageError: it has skipped as many batches as are behind the position, or the rest of the epoch.
        """
        passed, self.is_settled = self.taken - 1, True
        text = (
            f"load_state put a loader behind the {self.behind} batches of its epoch that were done, and the script "
            f"took {passed} more before the one that it trains on first. If it skips batches that were done, these "
            "are lost. Remove the skip from the script: the loader continues by itself. Or skip by "
            f"skip_first_batches(loader, {self.behind}), which does not skip twice."
        )
        if passed == self.behind or (self.left_over or 0) > MOST_READ_AHEAD:
            raise UsageError(text)
        if passed > 0 and self.rank == 0:
            logger.warning(text)


@dataclass(eq=False)
class LoaderProgress:
    """How far one running iteration over a prepared loader is; written by the loader alone.

    ``counts`` is None when the loader cannot know them. ``batches``: of this rank, handed out of this epoch.
    """

    loader: object = None
    batches: int = 0
    end_of_data: bool = False
    counts: BatchCounts | None = None
    resumption: Resumption | None = None


class PluginKwargs(dict[str, Any]):
    """How windows are counted, by Accelerate's names; a value that is set here is set in the state."""

    def __init__(self, state: StepState) -> None:
        self._state = state
        # As the plugin's ``to_kwargs``: what is not its default, and always the number of steps.
        super().__init__(
            (name, getattr(state, field))
            for name, field in PLUGIN_FIELDS.items()
            if name == "num_steps" or getattr(state, field) != getattr(StepState, field)
        )

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
        """Note that a script asks an optimizer to step; ``step_if_due`` does it where ``sync_gradients`` is true."""

    def clears(self) -> bool:
        """Return whether gradients that a script asks to clear are cleared."""


class StateBeingSaved(Protocol):
    """A state that is copied while training goes on: an optimizer waits for that before it steps."""

    def before_step(self) -> None:
        """Wait until it is copied."""


@dataclass
class StepState:
    """The state of the current step of one ``Accelerator``.

    ``sync_gradients``: this backward ends an accumulation window, so gradients are averaged over
    the ranks and the optimizer steps. ``backward_calls``: in this micro-batch so far. ``stepping``: a prepared
    optimizer is in its step. ``is_in_window``: a micro-batch runs, inside of ``accumulate``. ``virtual_ranks``: this
    process trains on the batches of so many ranks, one after another, so that windows are longer; ``turns`` then says
    when what a script asks for is done. ``being_saved``: the state that a save in the background is about to copy.
    ``has_given_batches``: a loop over a prepared loader has begun.
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
    has_given_batches: bool = False

    def __getstate__(self) -> dict[str, Any]:
        # Nobody saves the state of a copy.
        return {**self.__dict__, "being_saved": None}

    @property
    def window_length(self) -> int:
        """Micro-batches of this process for each optimizer step."""
        return self.accumulation_steps * self.virtual_ranks

    def begin(self, progress: LoaderProgress) -> None:
        """Note that a prepared loader starts an iteration; the latest to start is the active one."""
        self.running.append(progress)
        self.has_given_batches = True

    def finish(self, progress: LoaderProgress) -> None:
        self.running = [other for other in self.running if other is not progress]

    def trains(self) -> None:
        """Note that the script trains on the batches that it took last.

        Raises:
            UsageError: it skips again what was done.
        """
        for progress in self.running:
            if progress.resumption is not None and not progress.resumption.is_settled:
                progress.resumption.settle()

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
