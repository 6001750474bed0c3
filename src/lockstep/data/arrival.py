"""Batches of indices whose arrival in a worker process seeds the process's random number generators.

So what a worker draws while it reads a batch depends on the batch, not on the batches that this worker had before:
neither a resumed run nor another number of workers changes it.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import get_worker_info

from lockstep.data.rng import Generators, States, mixed_seed, seed_generators


class SeededIndex:
    """An index, or a batch of them, for a worker process, in which it arrives as ``index`` alone.

    ``key`` are the numbers that seed the generators there (None: they stay), ``states`` where they are brought
    instead. With ``announced_epoch`` the worker's copy of the dataset is told the epoch; workers that live through
    several epochs would not learn of it.
    """

    __slots__ = ("announced_epoch", "index", "key", "states")

    def __init__(
        self,
        index: Any,
        key: tuple[int, ...] | None,
        announced_epoch: int | None,
        states: States | None = None,
    ) -> None:
        self.index = index
        self.key = key
        self.announced_epoch = announced_epoch
        self.states = states

    def __reduce__(self) -> Any:
        return _arrive, (self.index, self.key, self.announced_epoch, self.states)


def _arrive(
    index: Any, key: tuple[int, ...] | None, announced_epoch: int | None, states: States | None
) -> Any:
    worker = get_worker_info()
    # Copies made elsewhere must leave the generators alone.
    if worker is not None:
        set_epoch = getattr(worker.dataset, "set_epoch", None)
        if announced_epoch is not None and callable(set_epoch):
            set_epoch(announced_epoch)
        if key is not None:
            seed_generators(mixed_seed(*key))
        if states is not None:
            Generators().write(states)
    return index
