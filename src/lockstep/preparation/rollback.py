"""Back to a checkpoint in the middle of a loop: all but where the data stand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.checkpoint.contents import CheckpointContents
from lockstep.data.loader import PreparedLoader
from lockstep.runtime.step import StepState

if TYPE_CHECKING:
    from lockstep.checkpoint.checkpointer import Checkpointer


class Rollback:
    """Takes a run back to one of its checkpoints, in its own loop.

    Models, optimizers, schedulers, loss scale, generators and registered objects become what they were. Loaders go on
    where they are: the script's loop gets the batch behind those that it has got.

    Args:
        contents: What a checkpoint is made of.
        loaded: Called with the path, and the seconds that it took.
    """

    def __init__(
        self,
        step: StepState,
        checkpointer: Callable[[], Checkpointer],
        contents: Callable[[], CheckpointContents],
        loaded: Callable[[str, float], None],
    ) -> None:
        self._step = step
        self._checkpointer = checkpointer
        self._contents = contents
        self._loaded = loaded

    def leave_out(self, batches: int) -> tuple[int, int | None]:
        """See ``GoesBack``. Those of the loader over which a loop runs now, at most to the end of its epoch."""
        loader = self._step.active_dataloader
        if not batches or not isinstance(loader, PreparedLoader):
            return 0, 0
        return loader.leave_out(batches)

    def load(self, path: str) -> None:
        """See ``GoesBack``."""
        from lockstep.checkpoint.load import load_checkpoint  # with pydantic, which a run may never need

        def contents() -> CheckpointContents:
            found = self._contents()
            loaders = [_UnmovedLoader() for _ in found.parts.get("loader", ())]
            return replace(found, parts={**found.parts, "loader": loaders})

        began = time.perf_counter()
        load_checkpoint(self._checkpointer(), path, contents)
        self._loaded(path, time.perf_counter() - began)


class _UnmovedLoader:
    """Stands for a loader that is not to be moved."""

    def state_dict(self) -> dict[str, object]:
        return {}

    def check_state_dict(self, state: Mapping[str, object]) -> None:
        """Nothing is wrong with it."""

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Leave the loader where it is."""
