"""One process that tells a script of several: how many there are, and how short their loaders."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.data.loader import PreparedLoader
from lockstep.runtime.control import ProcessControl


class _ToldLoader(PreparedLoader):
    """A loader with all ranks' batches, and the length that one rank's has."""

    told_ranks = 1

    def __len__(self) -> int:
        return -(-super().__len__() // self.told_ranks)


def tell_of_ranks(ranks: int) -> Callable[[], None]:
    """Let ``accelerator.num_processes`` be so many, until what is returned is called."""
    original = ProcessControl.num_processes
    ProcessControl.num_processes = property(lambda self: ranks)  # type: ignore[method-assign,assignment]

    def restore() -> None:
        ProcessControl.num_processes = original  # type: ignore[method-assign]

    return restore


def tell_length(loader: PreparedLoader, ranks: int) -> None:
    """Let ``len`` of a loader be that of one of so many ranks."""
    loader.__class__ = _ToldLoader
    vars(loader)["told_ranks"] = ranks
