"""The generators of a loader's worker processes, which torch seeds: told with each batch, so that a run can continue.

A worker's generators depend on all that it has read. So what a worker hands over says where its generators stand, if
they have moved, and after a load the first batch that a worker gets brings them there. Where a batch seeds the
generators as it arrives, what a worker draws depends on the batch, not on those that this worker had before: neither a
resumed run nor another number of workers changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.data import get_worker_info

from lockstep.comm.tree import StateDict
from lockstep.data.rng import (
    Generators,
    States,
    mixed_seed,
    plain_states,
    same_state,
    seed_generators,
    states_of,
)
from lockstep.errors import CheckpointError


def own_generators(dataset: object) -> list[torch.Generator]:
    """The generator that a dataset holds, of which each worker process has a copy."""
    own = getattr(dataset, "generator", None)
    return [own] if isinstance(own, torch.Generator) else []


def read_generators(dataset: object) -> States:
    """Where the generators of a worker process stand: the global ones, and that of its copy of the dataset."""
    return Generators(own_generators(dataset)).read()


def write_generators(dataset: object, states: States) -> None:
    """Bring them to ``states``. Those of earlier versions have the global ones only."""
    Generators(own_generators(dataset)[: len(states) - 3]).write(states)


class FromWorker(NamedTuple):
    """A batch, the worker that made it, and where its generators stand (None: where they stood before)."""

    batch: object
    worker: int
    states: SentStates | None


class TellingCollate:
    """``collate``, whose results a worker process hands over as ``FromWorker``."""

    def __init__(self, collate: Callable[[object], object]) -> None:
        self.collate = collate
        self.last_sent: States | None = None

    def __call__(self, rows: object) -> object:
        batch = self.collate(rows)
        worker = get_worker_info()
        if worker is None:
            return batch
        states = read_generators(worker.dataset)
        if self.last_sent is not None and all(map(same_state, states, self.last_sent)):
            return FromWorker(batch, worker.id, None)
        self.last_sent = states
        # As an array: a tensor would travel through shared memory of its own.
        return FromWorker(batch, worker.id, SentStates(states))


class SentStates:
    """States on their way out of a worker: torch's as bytes, which no thread that pins memory looks into."""

    def __init__(self, states: States) -> None:
        self.torch = [state.numpy().tobytes() for state in (states[0], *states[3:])]
        self.others = states[1:3]

    def states(self) -> States:
        first, *own = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in self.torch]
        return [first, *self.others, *own]


@dataclass
class WorkerStates:
    """What is known of the generators of worker processes that torch has seeded.

    ``turn``: the worker whose batch is next. ``states``: by worker, where its generators stood behind its last batch
    that was handed over (None: none was). ``born``: the generators of this process before workers that persist were
    made, unless that was at the beginning of this epoch.
    """

    states: list[States | None]
    turn: int = 0
    born: States | None = None

    @classmethod
    def of(cls, workers: int) -> WorkerStates:
        return cls([None] * workers)

    def plain(self) -> StateDict:
        return {
            "turn": self.turn,
            "states": [None if states is None else plain_states(states) for states in self.states],
            "born": None if self.born is None else plain_states(self.born),
        }

    @classmethod
    def read(cls, plain: StateDict) -> WorkerStates:
        """What ``plain`` returned. Raises CheckpointError if that is not what this is."""
        try:
            turn, states, born = plain["turn"], plain["states"], plain["born"]
            known = [None if item is None else states_of(item) for item in states]
            if type(turn) is not int or not 0 <= turn < max(1, len(known)):
                raise ValueError(f"turn {turn!r} of {len(known)} workers")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The state of a loader has states of its workers that are not valid ({error}). Pass what "
                "state_dict() returned, unchanged."
            ) from error
        return cls(known, turn, None if born is None else states_of(born))


class SeededIndex:
    """An index, or a batch of them, for a worker process, in which it arrives as ``index`` alone.

    ``key`` are the numbers that seed the generators there (None: they stay), ``states`` where they are brought
    instead. With ``announced_epoch`` the worker's copy of the dataset is told the epoch; workers that live through
    several epochs would not learn of it.
    """

    __slots__ = ("announced_epoch", "index", "key", "states")

    def __init__(
        self,
        index: object,
        key: tuple[int, ...] | None,
        announced_epoch: int | None,
        states: States | None = None,
    ) -> None:
        self.index = index
        self.key = key
        self.announced_epoch = announced_epoch
        self.states = states

    def __reduce__(self) -> tuple[object, ...]:
        return _arrive, (self.index, self.key, self.announced_epoch, self.states)


def _arrive(
    index: object, key: tuple[int, ...] | None, announced_epoch: int | None, states: States | None
) -> object:
    worker = get_worker_info()
    # Copies made elsewhere must leave the generators alone.
    if worker is not None:
        set_epoch = getattr(worker.dataset, "set_epoch", None)
        if announced_epoch is not None and callable(set_epoch):
            set_epoch(announced_epoch)
        if key is not None:
            seed_generators(mixed_seed(*key))
        if states is not None:
            write_generators(worker.dataset, states)
    return index
