"""The batches of all ranks, of a loader whose global batches they share: each is collated of its own rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lockstep.data.loader import PreparedLoader
from lockstep.data.worker_states import TellingCollate


class RankBatches(NamedTuple):
    """A global batch, and what each rank has of it; ``of_ranks`` is empty where its rows do not go round."""

    whole: Any
    of_ranks: tuple[object, ...]


class CollateForRanks:
    """``collate``, for a global batch and for the rows of each of so many ranks.

    A rank that pads its rows to the longest of them has other tensors than a slice of the padded global batch.
    """

    def __init__(self, collate: Callable[[Any], Any], ranks: int) -> None:
        self._collate = collate
        self._ranks = ranks

    def __call__(self, rows: object) -> RankBatches:
        if not isinstance(rows, list):  # of a dataset that makes whole batches in a form of its own
            return RankBatches(self._collate(rows), ())
        each, left = divmod(len(rows), self._ranks)
        starts = range(0, 0 if left else len(rows), max(each, 1))
        return RankBatches(
            self._collate(rows), tuple(self._collate(rows[start : start + each]) for start in starts)
        )


def collate_for_ranks(loader: PreparedLoader, ranks: int) -> None:
    """Have a loader of map-style data hand over ``RankBatches``; others hand over whole batches as before."""
    inner = loader.inner
    if inner.batch_sampler is None:
        return
    if isinstance(inner.collate_fn, TellingCollate):
        inner.collate_fn.collate = CollateForRanks(inner.collate_fn.collate, ranks)
    else:
        inner.collate_fn = CollateForRanks(inner.collate_fn, ranks)
