"""The with block in which ranks train by themselves."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

from lockstep.errors import UsageError


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
