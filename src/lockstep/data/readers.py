"""What reads the data of an epoch: the interface of readers, and what they share.

Each reader has ``inner``, the torch loader built around the user's dataset, and ``read(begin)``: an iterator over the
rounds in which its ranks have batches. The epoch's last round is known as such when it is handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from lockstep.comm.tree import find_batch_size
from lockstep.data.drawn import Drawing
from lockstep.data.position import Progress
from lockstep.data.rng import States, mixed_seed
from lockstep.runtime.step import BatchCounts


@dataclass(frozen=True)
class ReadStart:
    """Where reading begins: ``left_out`` rounds after what is ``behind``.

    ``drawing``: the loader's own samplers draw the order (None: it is a function of seed and epoch).
    """

    seed: int
    epoch: int
    behind: Progress
    left_out: int = 0
    drawing: Drawing | None = None


class ReadRound(NamedTuple):
    """What is known of one round, in which each of the reader's ranks has a batch.

    ``behind`` is the position after it; None: the epoch is over with it. ``last``: these ranks have no later batch.
    ``digest`` is the checksum of the samples up to it, where one is needed; ``states``: the generators behind it, where
    it was read privately.
    """

    counts: BatchCounts | None
    last: bool
    behind: Progress | None
    digest: int | None = None
    states: States | None = None


new_round: Callable[[tuple[object, ...]], ReadRound] = partial(tuple.__new__, ReadRound)
"""A ``ReadRound`` from its fields, as a call in C: one is made for each batch."""

GlobalBatches = Iterator[tuple[Sequence[object], ReadRound]]
"""The batches of the reader's ranks in each round, and what is known of it."""


@dataclass
class PersistentWorkers:
    """When the persistent workers of a loader were made, for which torch's loader draws from the generators.

    ``existed``: when the running epoch began. ``loaded``: they did so in the run that is continued.
    """

    inner: DataLoader[object]
    existed: bool = False
    exist: bool = False
    loaded: bool = False

    def begin(self, drawing: Drawing) -> None:
        """Begin an epoch; workers that the saved run had before are made first, as if nothing were drawn for them."""
        if self.loaded and not self.exist and self.inner.persistent_workers:
            with drawing.generators.at(drawing.generators.read()):
                iter(self.inner)
            self.exist = True
        self.loaded = False
        self.existed, self.exist = self.exist, self.inner.persistent_workers


class Reader(Protocol):
    @property
    def inner(self) -> DataLoader[object]: ...

    @property
    def has_position(self) -> bool:
        """Whether the position in the middle of an epoch is known."""

    @property
    def workers(self) -> PersistentWorkers: ...

    def read(self, begin: ReadStart) -> GlobalBatches: ...


def seed_workers(inner: DataLoader[object], begin: ReadStart, own: torch.Generator | None) -> None:
    """Let ``inner`` draw the seed of its workers as torch does for the user's loader, whose generator is ``own``.

    Where the order is a function of seed and epoch that seed is one too, and no global generator is drawn from.
    """
    if begin.drawing is not None:
        inner.generator = own
    else:
        inner.generator = torch.Generator().manual_seed(mixed_seed(begin.seed, begin.epoch))


def row_count(batch: object) -> int | None:
    """Rows of a collated batch; None if it holds no tensor that tells."""
    try:
        return find_batch_size(batch)
    except ValueError:
        return None


def measured(batch: object) -> BatchCounts | None:
    """Return the counts of one rank's batch in a world of one, read off its tensors."""
    size = row_count(batch)
    return None if size is None else BatchCounts(rows=(size,), real=(size,))
