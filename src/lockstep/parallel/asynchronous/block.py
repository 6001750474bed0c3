"""The with block in which ranks train by themselves, and where they meet: at the same step, or all with an error."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

from lockstep.comm.collectives import Communicator
from lockstep.errors import LockstepError, UsageError


class TrainingBlock:
    """Entered by one ``with`` at a time. Subclasses say what begins with it and how it ends."""

    def __init__(self) -> None:
        self._name = type(self).__name__
        self._exits: ExitStack | None = None

    def __enter__(self) -> Any:
        if self._exits is not None:
            raise UsageError(f"{self._name} was entered twice. Use one with block at a time.")
        with ExitStack() as exits:
            self._begin(exits)
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._exits is not None
        exits, self._exits = self._exits, None
        with exits:
            self._end(error)

    def _begin(self, exits: ExitStack) -> None:
        """``exits`` are left after ``_end``, and if this fails."""
        raise NotImplementedError

    def _end(self, error: BaseException | None) -> None:
        """``error``: what left the block, or None."""
        raise NotImplementedError


def meet(communicator: Communicator, what: str, step: int, failure: BaseException | None = None) -> None:
    """Wait until all ranks are here.

    Args:
        what: Names the meeting; equal on all ranks that belong together.
        step: Optimizer steps that this rank has made.
        failure: Why this rank can take no further part.

    Raises:
        LockstepError: some rank failed.
        UsageError: the ranks meet elsewhere, or after different numbers of steps.
    """
    if communicator.world_size == 1:
        return
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    places = communicator.gather_object([(what, step, told)])
    for rank, (_, steps, message) in enumerate(places):
        if message is not None:
            raise LockstepError(
                f"Rank {rank} left {what} after {steps} steps with {message} This rank stops with it. "
                "Mend the cause on that rank."
            )
    if len(set(places)) > 1:
        found = ", ".join(
            f"rank {rank} {name} after {steps} steps" for rank, (name, steps, _) in enumerate(places)
        )
        raise UsageError(
            f"Ranks met at different places: {found}. Let every rank make the same number of steps: prepare the "
            "loader with even_batches=True."
        )
