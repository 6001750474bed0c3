"""The order that the loader's own samplers draw, from the generators that torch's loader would let them draw from.

torch's loader draws at known moments: when an iteration begins, it may draw in ``iter(sampler)`` and draws one number
that seeds its workers; a ``RandomSampler`` without a generator draws its seed when the first batch is asked for. In a
process on its own all of these are left to torch. Several processes draw privately, each from copies of the generators
of rank 0, so that they have one order whatever else each of them draws.
"""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lockstep.comm.tree import StateDict
from lockstep.data.batch_sharding import CutSamples, grouped
from lockstep.data.order import IndexBatch, is_cut_anew, one_batch, samplers_of, skip_batches
from lockstep.data.rng import Generators, PrivateDraws, States, epoch_seed, same_state
from lockstep.errors import CheckpointError

T = TypeVar("T")

BLOCK = 4096
"""Samples (or batches) that several processes draw at once."""


class SeedableRandomSampler(RandomSampler):
    """A ``torch.utils.data.RandomSampler`` that is seeded with seed + epoch in each iteration.

    Args:
        args: Positional arguments of ``RandomSampler``, such as the dataset.
        kwargs: Keyword arguments of ``RandomSampler``, and ``data_seed``: the seed. Without it, torch's seed is used.

    Examples:
        ```python
        from lockstep.data_loader import SeedableRandomSampler

        sampler = SeedableRandomSampler(range(8), data_seed=42)
        sampler.set_epoch(1)
        order = list(sampler)
        sampler.set_epoch(1)
        assert list(sampler) == order  # a function of seed and epoch
        ```
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.random.initial_seed() if seed is None else seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch ``epoch``."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(epoch_seed(self.initial_seed, self.epoch))
        yield from super().__iter__()
        self.epoch += 1


class SeededSampler(SeedableRandomSampler):
    """What ``sampler`` gives under a generator seeded with ``seed + epoch`` at the beginning of each iteration."""

    def __init__(self, sampler: RandomSampler, seed: int) -> None:
        # RandomSampler.__init__ is left out on purpose: the sampler that draws is the copy.
        self.__dict__.update(vars(sampler))
        self.sampler = copy.copy(sampler)
        if self.sampler.generator is None:
            self.sampler.generator = torch.Generator()
        self.seed = seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.sampler.generator.manual_seed(epoch_seed(self.seed, self.epoch))
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)


def with_seedable(sampler: T, seed: int) -> tuple[T | SeededSampler, SeededSampler | None]:
    """Return ``sampler``, or a copy of it in which a ``RandomSampler`` is seeded for each epoch, and what does that."""
    if isinstance(sampler, RandomSampler):
        seedable = SeededSampler(sampler, seed)
        return seedable, seedable
    if not isinstance(getattr(sampler, "sampler", None), RandomSampler):
        return sampler, None
    duplicate: Any = copy.copy(sampler)
    duplicate.sampler = SeededSampler(duplicate.sampler, seed)
    return duplicate, duplicate.sampler


def generators_of(loader: DataLoader[object]) -> Generators:
    """Return the global generators and those that loader, samplers and dataset hold, each once."""
    found: list[torch.Generator] = []
    for holder in (loader, *samplers_of(loader), loader.dataset):
        own = getattr(holder, "generator", None)
        if isinstance(own, torch.Generator) and all(own is not other for other in found):
            found.append(own)
    return Generators(found)


def of_samplers(loader: DataLoader[object], generators: Generators) -> int:
    """Return how many of the own ``generators`` are those of the loader and its samplers; they come first."""
    generators_of_samplers = [getattr(holder, "generator", None) for holder in (loader, *samplers_of(loader))]
    return sum(any(own is generator for generator in generators_of_samplers) for own in generators.own)


def stateful_samplers(loader: DataLoader[object]) -> list[Any]:
    """Return the samplers that keep a state of their own. The order of one with ``set_epoch`` is a function of the
    epoch."""
    methods = ("state_dict", "load_state_dict")
    return [
        sampler
        for sampler in samplers_of(loader)
        if all(hasattr(sampler, name) for name in methods) and not hasattr(sampler, "set_epoch")
    ]


def pass_epochs(loader: DataLoader[object], epochs: int) -> None:
    """Bring random numbers and counters that the samplers keep for themselves to where so many epochs bring them.

    Samplers that begin each epoch anew, or that keep a state, have nothing to pass. The generators stay.
    """
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    keeps = any(hasattr(one, "set_epoch") for one in samplers_of(loader)) or stateful_samplers(loader)
    if keeps or draws_at_once(sampler):
        return
    try:
        length = len(sampler)
    except TypeError:
        # Without a length nothing says how often it is asked.
        return
    generators = generators_of(loader)
    with generators.at(generators.read()):
        for _ in range(epochs):
            # One more than there are: what follows the last one is run.
            deque(islice(sampler, length + 1), maxlen=0)


def states_of_samplers(samplers: Iterable[Any]) -> list[StateDict]:
    return [copy.deepcopy(sampler.state_dict()) for sampler in samplers]


def draws_nothing(sampler: object) -> bool:
    """Return whether the order is the same from any state of the generators."""
    if type(sampler) is BatchSampler:
        return draws_nothing(sampler.sampler)
    return type(sampler) in (SequentialSampler, SeededSampler, range, list, tuple)


def draws_at_once(sampler: object) -> bool:
    """Return whether the order is settled by what is drawn until the first sample, whatever is drawn later."""
    if type(sampler) is BatchSampler:
        return draws_at_once(sampler.sampler)
    if type(sampler) is RandomSampler and sampler.generator is not None:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return draws_nothing(sampler) or type(sampler) in (
        RandomSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    )


@dataclass
class Drawing:
    """What is drawn for one epoch, and from where.

    ``start``: the generators before the iteration began. ``first``: before the samplers were asked for the first
    sample (None: they were not). ``is_replay``: the epoch was begun elsewhere, and is drawn again up to where it
    stands. ``private``: several processes draw. ``digest``: the checksum of the samples behind a loaded position.
    ``shown``: where a stream that is read privately has brought the generators last. ``retraced``: so many of the own
    generators stand after a replay where it has brought them, because the saved run drew further ahead, or less far.
    ``saved``: where the generators stood when the position was saved, if worker processes had or get samples ahead of
    it. ``after_sample``: where a replay of samplers that may draw at each sample has brought them with the first one.
    ``samplers``: the states before the iteration began of samplers that keep one.
    """

    generators: Generators
    start: States
    first: States | None = None
    private: PrivateDraws | None = None
    is_replay: bool = False
    digest: int | None = None
    shown: States | None = None
    retraced: int = 0
    saved: States | None = None
    after_sample: States | None = None
    samplers: Sequence[StateDict] = ()

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Surround the beginning of an iteration of torch's loader, in which a replay comes to where the epoch
        stands."""
        if not self.is_replay:
            with nullcontext() if self.private is None else self.private.begun():
                yield
            return
        # The generators do not follow: they have done so where the epoch was begun.
        draws = self.private or PrivateDraws(self.generators, self.start)
        with draws.hidden():
            yield
        draws.shown = draws.states
        self._check_ahead(draws.states)
        if self.retraced:
            # The first three are torch's, Python's and NumPy's global ones.
            end = 3 + self.retraced
            now = self.generators.read()
            self.generators.write(now[:3] + draws.states[3:end] + now[end:])

    def _check_ahead(self, states: States) -> None:
        """Raise CheckpointError if samples ahead of the position are others than the saved run had drawn.

        They are the same if nobody else has drawn from the generators from which the samplers draw as they go: then a
        replay brings these to where they stood.
        """
        if self.saved is None or self.after_sample is None:
            return
        compared = len(states) if not self.retraced else 3
        for before, now, saved in list(zip(self.after_sample, states, self.saved, strict=True))[:compared]:
            if not same_state(before, now) and not same_state(now, saved):
                raise CheckpointError(
                    "The sampler draws each sample when it is asked for, and worker processes get samples ahead of "
                    "the position at which this state was saved. These cannot be drawn again: other code draws from "
                    "the same generators, or num_workers was another. Start a new epoch with "
                    "loader.set_epoch(loader.epoch + 1), or train with DataLoaderConfiguration(data_seed=...), in "
                    "which seed and epoch alone determine the order."
                )

    def first_is_asked_for(self) -> None:
        if self.first is None:
            self.first = self.generators.read()
        elif self.is_replay:
            self.generators.write(self.first)


class DrawnOrder:
    """One epoch of the batches that ``sampler`` gives, asked for when they are wanted."""

    def __init__(self, sampler: Iterable[object], opaque: bool, drawing: Drawing) -> None:
        self.sampler = sampler
        self.opaque = opaque
        self.drawing = drawing
        # Of the samples behind; None: torch's own samplers give the same ones again.
        self.digest = None if draws_at_once(sampler) else 0
        self._cut = sampler if is_cut_anew(sampler) else None
        # torch's loader calls iter now, and asks for the first batch later. That of a BatchSampler draws nothing.
        self._source = None if self._cut is not None else iter(sampler)
        self._opened_source: Iterator[object] | None = None
        # Chains hand on the samples without a call of Python code for each.
        self._items = chain.from_iterable(self._drawn())
        self._given = 0

    def behind(self, samples: int, beginning: int) -> tuple[list[IndexBatch], Iterable[IndexBatch]]:
        """Return the first ``beginning`` batches, and those behind ``samples``.

        Nothing behind ``samples`` is drawn yet.

        Raises:
            CheckpointError: no batch ends there, or what comes before is not what was saved.
        """
        found: tuple[list[IndexBatch], Iterable[IndexBatch]]
        if self._cut is not None:
            size = self._cut.batch_size
            head = list(islice(self._items, beginning * size))
            self.digested(islice(chain(head, self._items), samples))
            later = chain(head[samples:], self._items)
            found = (
                list(grouped(head, size, drop_last=False)),
                CutSamples(later, size, self._cut.drop_last),
            )
        else:
            source = self._whole_batches()
            first = list(islice(source, beginning))
            batches = chain(first, source)
            skip_batches(map(list, map(self._noted, batches)), samples, type(self.sampler).__name__)
            found = first, batches
        expected = self.drawing.digest
        if samples and expected is not None and self.digest not in (None, expected):
            raise CheckpointError(
                f"{self._name()} does not give the same first {samples} samples again: it has random numbers or "
                "counters of its own, other code draws from its generators between its samples, or it is another "
                "sampler. Give it state_dict() and load_state_dict(), or set_epoch(). Or start a new epoch with "
                "loader.set_epoch(loader.epoch + 1)."
            )
        return found

    def digested(self, samples: Iterable[object]) -> int | None:
        """Return the checksum of the samples up to the end of these, which come next."""
        deque(self._noted(samples), maxlen=0)
        return self.digest

    def _noted(self, samples: Iterable[object]) -> Iterable[object]:
        """Return the same ones, by samples: another batch size cuts the same."""
        return samples if self.digest is None else map(self._note, samples)

    def _note(self, index: object) -> object:
        self.digest = zlib.crc32(repr(index).encode(), self.digest or 0)
        return index

    def _name(self) -> str:
        return type(self.sampler if self._cut is None else self._cut.sampler).__name__

    def is_over(self, samples: int) -> bool | None:
        """Return whether the batch that was given last, behind which are ``samples``, is the last one (None: not
        known)."""
        try:
            if self._cut is None:
                return self._given == len(cast(Sized, self.sampler))
            left = len(cast(Sized, self._cut.sampler)) - samples
            return left < (self._cut.batch_size if self._cut.drop_last else 1)
        except (TypeError, NotImplementedError):
            return None

    def known_samples(self) -> int | None:
        """Return the number of samples of the epoch, where batches may be cut at any of them (None: not known)."""
        try:
            return None if self._cut is None else len(cast(Sized, self._cut.sampler))
        except (TypeError, NotImplementedError):
            return None

    def _whole_batches(self) -> Iterator[IndexBatch]:
        for item in self._items:
            self._given += 1
            yield one_batch(item, self.opaque)

    def _drawn(self) -> Iterator[Iterable[object]]:
        """Yield what the sampler gives, sample by sample, or batch by batch where it makes batches itself, in
        blocks."""
        private = self.drawing.private
        if private is None:
            # Nothing is drawn but what the next sample needs, as in torch's loader.
            source = self._opened()
            if self.drawing.is_replay and self.digest is not None:
                first = list(islice(source, 1))
                self.drawing.after_sample = self.drawing.generators.read()
                yield first
            yield source
        else:
            yield from iter(partial(self._block, private), [])

    def _block(self, private: PrivateDraws) -> list[object]:
        with private.followed():
            if self._opened_source is None:
                self._opened_source = self._opened()
            return list(islice(self._opened_source, BLOCK))

    def _opened(self) -> Iterator[object]:
        self.drawing.first_is_asked_for()
        return iter(self._cut.sampler) if self._cut is not None else cast(Iterator[object], self._source)
