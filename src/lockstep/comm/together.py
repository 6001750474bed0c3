"""Blocks in which ranks fail together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.comm.collectives import Communicator


@contextmanager
def together(communicator: Communicator) -> Iterator[None]:
    """A block that every rank runs; an exception on one of them is raised on all at its end.

    The block itself must hold no collective, or a rank that failed would leave the others waiting in it.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    communicator.agree(failure)
