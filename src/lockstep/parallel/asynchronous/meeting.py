"""Where ranks that train by themselves meet: all at the same step, or all with an error."""

from __future__ import annotations

from lockstep.comm.collectives import Communicator
from lockstep.errors import LockstepError, UsageError


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
