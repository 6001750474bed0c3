"""Seed the generators of worker processes for each batch, as a function of seed, epoch and place in the order.

So what a worker draws does not depend on the batches that it had before: a resumed run, another number of workers and
another number of ranks draw the same numbers for the same batch.
"""

from __future__ import annotations

import torch
from torch.utils.data import get_worker_info

from lockstep.data.rng import mixed_seed, seed_generators


class SeededIndex:
    """An index, or a batch of them, for a worker process, in which it arrives as ``index`` alone.

    ``key`` are the numbers that seed the generators there. With ``announced_epoch`` the worker's copy of the dataset is
    told the epoch; workers that live through several epochs would not learn of it.
    """

    __slots__ = ("announced_epoch", "index", "key")

    def __init__(self, index: object, key: tuple[int, ...], announced_epoch: int | None) -> None:
        self.index = index
        self.key = key
        self.announced_epoch = announced_epoch

    def __reduce__(self) -> tuple[object, ...]:
        return _arrive, (self.index, self.key, self.announced_epoch)


def _arrive(index: object, key: tuple[int, ...], announced_epoch: int | None) -> object:
    worker = get_worker_info()
    # Copies made elsewhere must leave the generators alone.
    if worker is not None:
        set_epoch = getattr(worker.dataset, "set_epoch", None)
        if announced_epoch is not None and callable(set_epoch):
            set_epoch(announced_epoch)
        seed = mixed_seed(*key)
        seed_generators(seed)
        own = getattr(worker.dataset, "generator", None)
        if isinstance(own, torch.Generator):
            own.manual_seed(seed)
    return index
