"""What reads the data of an epoch: the interface of readers, and what they share.

Each reader has ``inner``, the torch loader built around the user's dataset, and ``read(begin)``: an iterator over the
rounds in which its ranks have batches. The epoch's last round is known as such when it is handed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DataLoader

from lockstep.comm.tree import find_batch_size
from lockstep.data.position import Behind
from lockstep.data.rng import mixed_seed
from lockstep.runtime.step import BatchCounts


@dataclass(frozen=True)
class Begin:
    """Where reading begins: ``left_out`` rounds after what is ``behind``.

    ``inner`` is the state of torchdata's loader for that place, where one is kept.
    """

    seed: int
    epoch: int
    behind: Behind
    inner: dict[str, Any] | None = None
    left_out: int = 0


class Dealt(NamedTuple):
    """One round: a batch for each of the reader's ranks.

    ``behind`` is the position after it; None: the epoch is over with it. ``last``: these ranks have no later batch.
    ``inner`` is the state of torchdata's loader after it, where one is kept.
    """

    batches: list[Any]
    counts: BatchCounts | None
    last: bool
    behind: Behind | None
    inner: dict[str, Any] | None = None


Rounds = Iterator[Dealt]


class Reader(Protocol):
    @property
    def inner(self) -> DataLoader[Any]: ...

    @property
    def keeps_inner_state(self) -> bool:
        """Whether ``inner`` keeps a state of the dataset, as torchdata's loader does."""

    @property
    def has_position(self) -> bool:
        """Whether the position in the middle of an epoch is known."""

    def read(self, begin: Begin) -> Rounds: ...


def seed_workers(inner: DataLoader[Any], begin: Begin) -> None:
    """Let the seed that ``inner`` draws for its workers depend on seed and epoch, and on no global generator."""
    if inner.generator is not None:
        inner.generator.manual_seed(mixed_seed(begin.seed, begin.epoch))


def row_count(batch: Any) -> int | None:
    """Rows of a collated batch; None if it holds no tensor that tells."""
    try:
        return find_batch_size(batch)
    except ValueError:
        return None


def measured(batch: Any) -> BatchCounts | None:
    """Counts of one rank's batch in a world of one, read off its tensors."""
    size = row_count(batch)
    return None if size is None else BatchCounts(rows=(size,), real=(size,))
