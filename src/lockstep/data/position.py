"""Where an epoch stands in the global order: what a saved state says, and whether a loaded one fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from lockstep.comm.tree import StateDict
from lockstep.data.drawn import Drawing
from lockstep.data.rng import States, plain_states, states_of
from lockstep.errors import CheckpointError
from lockstep.runtime.step import Resumption

_UNCHANGED = "Pass what state_dict() returned, unchanged."


class Progress(NamedTuple):
    """What the loop has behind it in an epoch: one number for each worker process of a stream, else one.

    ``samples`` have been dealt, out of the order or of the worker's stream. Dealing as it goes now began behind
    ``base`` of them and has made ``rounds`` since. ``turn`` is the worker whose round is next. ``digests`` are
    checksums of the samples, where they come out of streams (-1: not known).
    """

    samples: tuple[int, ...] = (0,)
    base: tuple[int, ...] = (0,)
    rounds: tuple[int, ...] = (0,)
    turn: int = 0
    digests: tuple[int, ...] = (0,)

    def after(self, worker: int, samples: int, digest: int) -> Progress:
        """Return the position after one more round of ``worker``, up to which its stream has this checksum."""
        behind, rounds, digests = [*self.samples], [*self.rounds], [*self.digests]
        behind[worker] += samples
        rounds[worker] += 1
        digests[worker] = digest
        turn = (worker + 1) % len(behind)
        return new_progress((tuple(behind), self.base, tuple(rounds), turn, tuple(digests)))

    def from_here(self) -> Progress:
        """Return the same samples, behind which another way of dealing begins."""
        return self._replace(base=self.samples, rounds=tuple(0 for _ in self.rounds))


new_progress: Callable[[tuple[object, ...]], Progress] = partial(tuple.__new__, Progress)
"""A ``Progress`` from its fields, as a call in C: one is made for each batch."""


def nothing(workers: int) -> Progress:
    """Return the beginning of an epoch that ``workers`` streams feed."""
    zeros = (0,) * max(1, workers)
    return Progress(zeros, zeros, zeros, 0, zeros)


def batches_behind(behind: Progress, rows: int | None) -> int:
    """Return how many batches of a rank are behind; the most that it can be where nobody has counted them.

    ``rows`` is how many samples the ranks have in a step (None: they vary).
    """
    # All was dealt in one way since the beginning, so rounds are batches.
    if not any(behind.base):
        return sum(behind.rounds)
    samples = sum(behind.samples)
    return -(-samples // rows) if rows else samples


def size_of(dataset: Any) -> int | None:
    """Return ``len(dataset)``, or None where it has no length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


@dataclass(frozen=True)
class Position:
    """A place in an epoch.

    ``same_world``: it was not loaded from a run with other numbers of data ranks or processes. ``drawing``: how the
    loader's own samplers draw the order of this epoch (None: the order is a function of seed and epoch, or the epoch
    has not begun). ``digest``: the checksum of the samples behind.
    """

    epoch: int
    behind: Progress
    same_world: bool = True
    drawing: Drawing | None = None
    digest: int | None = None

    @property
    def is_midway(self) -> bool:
        return any(self.behind.samples)


@dataclass(frozen=True)
class LoaderSetup:
    """How a loader reads and deals, as far as positions depend on it.

    ``kind`` is ``"map"`` or ``"stream"``. ``processes``: also those that share a model, and so batches; each has its
    own generators. ``dataset_size`` is None where the dataset has no length that this rank knows.
    """

    kind: str
    world_size: int
    batch_size: int | None
    split_batches: bool
    even_batches: bool
    drop_last: bool
    num_workers: int
    dataset_size: int | None
    processes: int

    @property
    def streams(self) -> int:
        """Streams of samples, each with a position of its own."""
        return max(1, self.num_workers) if self.kind == "stream" else 1


@dataclass
class Iteration:
    """One pass of a loop. ``behind`` is None once the whole epoch is."""

    epoch: int
    behind: Progress | None
    running: bool = True
    drawing: Drawing | None = None
    digest: int | None = None


@dataclass
class Epochs:
    """What a loader and its copies that skip batches share.

    ``seed`` of the order, the ``next`` epoch, the iteration that began last, and the position that the next
    one continues from. ``seeded``: the order is a function of seed and epoch.
    """

    seed: int
    seeded: bool = True
    next: int = 0
    latest: Iteration | None = None
    loaded: Position | None = None
    resumption: Resumption | None = None

    def choose(self, epoch: int) -> None:
        """Make ``epoch`` the next one; a loop that was broken off is over with that."""
        self.next = epoch
        if self.latest is not None and not self.latest.running:
            self.latest = None

    def position(self, streams: int) -> Position:
        """Return where a run would go on that is stopped now."""
        if self.loaded is not None and self.loaded.epoch == self.next:
            return self.loaded
        latest = self.latest
        if latest is None or latest.behind is None:
            return Position(self.next, nothing(streams))
        return Position(latest.epoch, latest.behind, drawing=latest.drawing, digest=latest.digest)

    def begin(self, streams: int) -> tuple[Position, Iteration]:
        """Start an iteration: where it begins, and the record of it."""
        loaded, self.loaded = self.loaded, None
        begin = Position(self.next, nothing(streams))
        # A loaded position is stale once another epoch was chosen.
        if loaded is not None and loaded.epoch == self.next:
            begin = loaded
        self.next += 1
        self.latest = Iteration(begin.epoch, begin.behind, drawing=begin.drawing, digest=begin.digest)
        return begin, self.latest


@dataclass(frozen=True)
class SavedDraws:
    """What the state of a loader says of a ``Drawing``; ``start`` is None between epochs.

    ``now``: the states of the generators when it was saved. ``seedable``: a ``RandomSampler`` is seeded for each epoch.
    ``workers``: persistent ones were made before the epoch. ``samplers``: the states of samplers that keep one, before
    the epoch began.
    """

    seedable: bool
    now: States
    start: States | None
    first: States | None
    digest: int | None
    shown: States | None
    workers: bool = False
    samplers: Sequence[StateDict] = ()

    def plain(self) -> StateDict:
        return {
            **({"samplers": [*self.samplers]} if self.samplers else {}),
            "seedable": self.seedable,
            "now": plain_states(self.now),
            "start": None if self.start is None else plain_states(self.start),
            "first": None if self.first is None else plain_states(self.first),
            "digest": self.digest,
            "shown": None if self.shown is None else plain_states(self.shown),
            "workers": self.workers,
        }

    @classmethod
    def read(cls, plain: object) -> SavedDraws:
        """Return what ``plain`` returned. Raises CheckpointError if that is not what this is."""
        kinds = {
            "seedable": bool,
            "now": dict,
            "start": dict,
            "first": dict,
            "digest": int,
            "shown": dict,
        }
        samplers = plain.get("samplers", []) if isinstance(plain, dict) else []
        is_list = isinstance(samplers, list) and all(isinstance(state, dict) for state in samplers)
        optional = {"samplers", "workers"}
        if not isinstance(plain, dict) or plain.keys() - optional != kinds.keys() or not is_list:
            raise CheckpointError(f"'draws' in the state of a loader is not valid. {_UNCHANGED}")
        for name, kind in kinds.items():
            value = plain[name]
            if type(value) is not kind and not (
                value is None and name in ("start", "first", "digest", "shown")
            ):
                raise CheckpointError(
                    f"'{name}' of the draws in the state of a loader is {value!r}. {_UNCHANGED}"
                )
        named = {name: plain[name] for name in ("now", "start", "first", "shown")}
        read = {name: None if states is None else states_of(states) for name, states in named.items()}
        if len({len(states) for states in read.values() if states is not None}) > 1:
            raise CheckpointError(
                "The numbers of generators in the state of a loader contradict each other: "
                f"{ {name: len(states) - 3 for name, states in read.items() if states is not None} }. "
                f"{_UNCHANGED}"
            )
        assert read["now"] is not None
        # Earlier versions kept states of worker processes, with those at which they were made before.
        workers = plain.get("workers")
        return cls(
            plain["seedable"],
            read["now"],
            read["start"],
            read["first"],
            plain["digest"],
            read["shown"],
            workers is True or (isinstance(workers, dict) and workers.get("born") is not None),
            samplers,
        )

    def check_fits(self, seedable: bool, own: int, samplers: int, is_midway: bool, reads: bool) -> None:
        """Raise CheckpointError if a loader with so many generators and stateful samplers cannot continue here."""
        if len(self.samplers) != samplers:
            raise CheckpointError(
                f"The position was saved by a loader with {len(self.samplers)} samplers that have state_dict() and "
                f"load_state_dict(), but this loader has {samplers}. Give it the samplers of the saved run."
            )
        if len(self.now) - 3 != own:
            raise CheckpointError(
                f"The position was saved by a loader with {len(self.now) - 3} random generators (also in its "
                f"samplers and dataset), but this loader has {own}. Give it the generators of the saved run."
            )
        if is_midway and self.seedable != seedable:
            raise CheckpointError(
                f"The position was saved with use_seedable_sampler={self.seedable}, but this loader has "
                f"use_seedable_sampler={seedable}, which gives another order. Use the setting of the saved run until "
                "the epoch is over."
            )
        if is_midway and reads and self.start is None:
            raise CheckpointError(
                "The position was saved by a rank that got its batches from rank 0, but in this run each rank "
                "reads its own batches. Use dispatch_batches=True until the epoch is over."
            )


def state_of(
    position: Position, seed: int, setup: LoaderSetup, draws: SavedDraws | None
) -> dict[str, object]:
    """Return plain values and tensors of generators, which ``read_state`` reads."""
    behind = position.behind
    state = {
        "epoch": position.epoch,
        "seed": seed,
        "samples": list(behind.samples),
        "base": list(behind.base),
        "rounds": list(behind.rounds),
        "turn": behind.turn,
        "digests": None if -1 in behind.digests else list(behind.digests),
        **asdict(setup),
    }
    return state if draws is None else {**state, "draws": draws.plain()}


# Key of a state -> the types it may have; "counts" is a list of whole numbers from 0.
FIELDS: dict[str, tuple[type | str, ...]] = {
    "epoch": (int,),
    "seed": (int,),
    "samples": ("counts",),
    "base": ("counts",),
    "rounds": ("counts",),
    "turn": (int,),
    "digests": ("counts", type(None)),
    "kind": (str,),
    "world_size": (int,),
    "batch_size": (int, type(None)),
    "split_batches": (bool,),
    "even_batches": (bool,),
    "drop_last": (bool,),
    "num_workers": (int,),
    "dataset_size": (int, type(None)),
    "processes": (int,),
}


def read_state(state: StateDict, here: LoaderSetup) -> tuple[Position, int, SavedDraws | None]:
    """Return the position that ``state`` gives a loader set up as ``here``, the seed of its order, and what it draws.

    Without draws the order is a function of the seed and the epoch: so it is always in states of version 0.1.

    Raises:
        CheckpointError: ``state`` is not one of ``state_of``, or of other data.
    """
    # Earlier versions counted data ranks only, and had no checksums of streams.
    if isinstance(state, Mapping) and "world_size" in state:
        state = {"processes": state["world_size"], "digests": None, **state}
    _check_fields(state)
    saved = LoaderSetup(**{name: state[name] for name in LoaderSetup.__dataclass_fields__})
    digests = [-1] * len(state["samples"]) if state["digests"] is None else state["digests"]
    samples, base, rounds = (tuple(state[name]) for name in ("samples", "base", "rounds"))
    behind = Progress(samples, base, rounds, state["turn"], tuple(digests))
    _check_consistent(behind, saved)
    _check_fits(behind, saved, here)
    # The same rounds of the same rows, whoever reads them: then a position inside of dealing holds as it is.
    same_dealing = replace(saved, num_workers=0, processes=0) == replace(here, num_workers=0, processes=0)
    if not any(behind.samples):
        behind = nothing(here.streams)
    elif not same_dealing:
        behind = behind.from_here()
    same_world = (saved.world_size, saved.processes) == (here.world_size, here.processes)
    draws = SavedDraws.read(state["draws"]) if "draws" in state else None
    return Position(state["epoch"], behind, same_world), state["seed"], draws


MOST_SAMPLES = 2**48
"""More than any run reads in an epoch."""


def _check_fields(state: object) -> None:
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"The state of a loader is a {type(state).__name__} instead of a dict. Pass what state_dict() returned."
        )
    missing, unknown = (
        sorted(FIELDS.keys() - state.keys()),
        # Earlier versions kept a state of torchdata's loader, "inner".
        sorted(map(str, state.keys() - FIELDS.keys() - {"draws", "inner"})),
    )
    if missing or unknown:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"has the unknown {', '.join(unknown)}"] if unknown else []
        raise CheckpointError(
            f"The state of a loader {' and '.join(parts)}. Pass what state_dict() of this version returned, unchanged."
        )
    for name, kinds in FIELDS.items():
        if not any(_is_a(state[name], kind) for kind in kinds):
            raise CheckpointError(
                f"'{name}' in the state of a loader is {state[name]!r}, which is not valid. Pass what "
                "state_dict() returned, unchanged."
            )


def _is_a(value: object, kind: type | str) -> bool:
    if kind == "counts":
        return isinstance(value, list) and bool(value) and all(_is_a(n, int) and n >= 0 for n in value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**64
    return isinstance(kind, type) and isinstance(value, kind)


def _check_consistent(behind: Progress, saved: LoaderSetup) -> None:
    lengths = {len(behind.samples), len(behind.base), len(behind.rounds), len(behind.digests)}
    problem = None
    if saved.kind not in ("map", "stream"):
        problem = f"kind {saved.kind!r}"
    elif any(count >= MOST_SAMPLES for count in behind.samples):
        problem = f"{max(behind.samples)} samples"
    elif saved.num_workers < 0 or saved.world_size < 1:
        problem = f"{saved.num_workers} workers and {saved.world_size} ranks"
    elif lengths != {saved.streams} or not 0 <= behind.turn < saved.streams:
        problem = f"{len(behind.samples)} positions and turn {behind.turn} for {saved.streams} streams"
    elif any(base > samples for base, samples in zip(behind.base, behind.samples, strict=True)):
        problem = f"base {list(behind.base)} behind samples {list(behind.samples)}"
    if problem is not None:
        raise CheckpointError(
            f"The state of a loader contradicts itself: {problem}. Pass what state_dict() returned, unchanged."
        )


def _check_fits(behind: Progress, saved: LoaderSetup, here: LoaderSetup) -> None:
    if saved.kind != here.kind:
        raise CheckpointError(
            f"The position was saved for a {_KINDS[saved.kind]} dataset, but this loader has a "
            f"{_KINDS[here.kind]} one. Prepare the loaders of the saved run, in the same order."
        )
    # None: the dataset has no length, or this rank does not read it.
    if None not in (saved.dataset_size, here.dataset_size) and saved.dataset_size != here.dataset_size:
        raise CheckpointError(
            f"The position was saved for a dataset of {saved.dataset_size} samples, but this loader has one of "
            f"{here.dataset_size}. Give it the dataset of the saved run, or, to continue with other data, "
            "prepare its loader after load_state."
        )
    if here.kind == "stream" and any(behind.samples) and saved.num_workers != here.num_workers:
        raise CheckpointError(
            f"The position was saved for an iterable dataset with num_workers={saved.num_workers}, where "
            f"each worker has a stream of its own, but this loader has num_workers={here.num_workers}. Use "
            f"num_workers={saved.num_workers} until the epoch is over."
        )


_KINDS = {"map": "map-style", "stream": "iterable"}
