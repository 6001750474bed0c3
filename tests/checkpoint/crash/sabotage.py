"""Writers with one mistake each, to see that the harness finds it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from checkpoint.crash.crashes import Outcome
from checkpoint.crash.subject import Scenario
from checkpoint.crash.trials import EXPLICIT, LIMIT_1, Slice
from lockstep.checkpoint import numbers
from lockstep.checkpoint.store import LocalStore
from patching import module_of

Broken = Callable[[], Any]


def outcomes(broken: Broken, kind: Callable[[Scenario, Slice], list[Outcome]]) -> list[Outcome]:
    """Trials with the mistake in this process, whose children inherit it."""
    scenario = LIMIT_1 if broken is prunes_first else EXPLICIT
    slices = 6 if kind.__name__ == "killed" else 90
    with broken():
        return kind(scenario, (slices, 1))


@contextmanager
def prunes_first() -> Iterator[None]:
    """Older checkpoints are removed before the new one is written."""
    begin = LocalStore.begin

    def hasty(self: Any, directory: str) -> str:
        folder = os.path.dirname(directory)
        for number in numbers(folder, self):
            self.remove(f"{folder}/checkpoint_{number}")
        return begin(self, directory)

    with patch.object(LocalStore, "begin", hasty):
        yield


@contextmanager
def syncs_nothing() -> Iterator[None]:
    """The page cache is left to itself."""

    class Lazy:
        def __getattr__(self, name: str) -> Any:
            return (lambda handle: None) if name == "fsync" else getattr(os, name)

    with patch.object(module_of(LocalStore), "os", Lazy()):
        yield
