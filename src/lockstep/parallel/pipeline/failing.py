"""A rank that fails in a pass is named on the others, which only see that it went away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch.distributed as dist

from lockstep.errors import LockstepError, UsageError
from lockstep.runtime import failure
from lockstep.torch_internals.c10d import default_store

MOST_CHARACTERS = 300
Part = Literal["forward", "backward"]


@contextmanager
def first_is_named(group: dist.ProcessGroup, title: str, call: int, part: Part = "forward") -> Iterator[None]:
    """Around a pass of a model called ``title``; ``call``: its number, the same on all ranks of ``group``.

    The store of the main group has the message of the rank that failed. Nothing is sent while none does.

    Raises:
        UsageError: another rank of the pipeline has failed.
    """
    try:
        yield
    except Exception as error:
        key = f"lockstep/pipeline/{dist.get_process_group_ranks(group)}/{title}/{part}/{call}"
        if not failure.is_consequence(error):
            _tell(key, error)
            raise
        told = _heard(key)
        if told is None:
            raise
        rank, _, text = told.partition(" ")
        raise consequence_of(int(rank), title, text, part) from error


def consequence_of(rank: int, title: str, text: str, part: Part = "forward") -> UsageError:
    """What other ranks raise where ``rank`` has failed."""
    consequence = UsageError(
        f"Rank {rank} failed in the {part} of {title} with {text} This rank stops with it. Mend the cause on that "
        "rank."
    )
    consequence.caused_by_rank = rank
    return consequence


def text_of(error: Exception) -> str:
    """What it was, in one line."""
    cause: BaseException = error
    while not isinstance(cause, LockstepError) and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__  # torch wraps what a forward raises
    lines = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {lines[0][:MOST_CHARACTERS].rstrip('.')}."


def _tell(key: str, error: Exception) -> None:
    text = text_of(error)
    try:
        store = default_store()
        if not store.check([key]):
            store.set(key, f"{dist.get_rank()} {text}")
    except RuntimeError:  # the store is gone with its rank: the error itself is still raised
        return


def _heard(key: str) -> str | None:
    try:
        store = default_store()
        return str(store.get(key).decode()) if store.check([key]) else None
    except RuntimeError:
        return None


def note_module(error: Exception, where: str) -> None:
    """Remember in which module ``error`` was raised, where frames only show copies of it."""
    if module_noted(error) is None:
        error.raised_in = where  # type: ignore[attr-defined]


def module_noted(error: BaseException | None) -> str | None:
    """What ``note_module`` remembered of it or of its causes."""
    while error is not None:
        noted: str | None = getattr(error, "raised_in", None)
        if noted is not None:
            return noted
        error = error.__cause__
    return None
