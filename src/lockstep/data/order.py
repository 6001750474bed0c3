"""One global order of samples or batches, a pure function of seed and epoch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from lockstep.data.batch_sharding import CutSamples, grouped, later
from lockstep.data.rng import draw_privately, epoch_generator, epoch_seed
from lockstep.errors import CheckpointError

T = TypeVar("T")
IndexBatch = Sequence[object]
"""Indices of one batch, or where the dataset makes batches itself the one index of it."""

# The attributes under which samplers hold other samplers.
NESTED = ("sampler", "batch_sampler")

SAMPLES_AT_ONCE = 4096
"""Samples that are drawn privately at once."""


@dataclass(frozen=True)
class GlobalOrder:
    """The order that ``sampler`` (of indices or of batches of indices) gives, the same on every rank.

    A sampler with a ``generator`` attribute, itself or inside, gets a generator seeded with
    ``seed + epoch``: with ``shuffle=True`` that is ``torch.randperm`` as ``DistributedSampler`` draws it.
    Any other sampler runs with the global generators of torch, Python and NumPy seeded likewise and
    restored afterwards. With ``opaque`` an item is not a batch of indices but counts as one sample.
    """

    sampler: Iterable[object]
    seed: int
    opaque: bool = False

    def batches(
        self, epoch: int, behind: int, beginning: int
    ) -> tuple[list[IndexBatch], Iterable[IndexBatch]]:
        """Return the first ``beginning`` batches of the epoch, and those that begin behind ``behind`` samples.

        The user's sampler is not modified. Without batches an item is yielded as the sampler gives it.
        The batches of torch's ``BatchSampler`` are cut anew there. Those of any other batch sampler stay whole.

        Raises:
            CheckpointError: by the iterator, if none of these ends behind so many samples.
        """
        sampler = seeded_copy(self.sampler, epoch_generator(self.seed, epoch))
        seed = epoch_seed(self.seed, epoch)
        if is_cut_anew(sampler):
            size = sampler.batch_size
            samples = draw_privately(sampler.sampler, seed, block_size=SAMPLES_AT_ONCE)
            first, rest = later(samples, behind, beginning * size)
            return list(grouped(first, size, drop_last=False)), CutSamples(rest, size, sampler.drop_last)
        drawn = draw_privately(self._whole_batches(sampler, behind, beginning), seed)
        return next(drawn), drawn

    def _whole_batches(self, sampler: Iterable[object], behind: int, beginning: int) -> Iterator[Any]:
        """First the list of batches at the beginning, then each later batch."""
        source = (one_batch(item, self.opaque) for item in sampler)
        head = list(islice(source, beginning))
        yield head
        batches = chain(head, source)
        skip_batches(batches, behind, type(sampler).__name__)
        yield from batches

    def __len__(self) -> int:
        return len(cast(Sized, self.sampler))


def is_cut_anew(sampler: object) -> TypeGuard[BatchSampler]:
    """Return whether batches may be cut at any sample: those of torch's ``BatchSampler``. Subclasses may make their
    own."""
    return type(sampler) is BatchSampler


def one_batch(item: object, opaque: bool) -> IndexBatch:
    return [item] if opaque else cast(IndexBatch, item)


def skip_batches(batches: Iterator[IndexBatch], behind: int, name: str) -> None:
    """Take ``behind`` samples in whole batches from ``batches``.

    Raises:
        CheckpointError: none of the batches of the sampler called ``name`` ends there.
    """
    passed = size = 0
    while passed < behind:
        batch = next(batches, None)
        if batch is None:
            raise CheckpointError(
                f"The position is after {behind} samples, but {name} gives only {passed} samples. Use the "
                "sampler of the saved run."
            )
        size = len(batch)
        passed += size
    if passed > behind:
        raise CheckpointError(
            f"The position is after {behind} samples, but no batch of {name} ends there: one ends after "
            f"{passed - size} samples and the next after {passed}. Use the batch sampler of the "
            "saved run until the epoch is over."
        )


def seeded_copy(sampler: T, generator: torch.Generator) -> T:
    """Return ``sampler`` with every ``generator`` in it replaced, on shallow copies; itself if it has none."""
    changes: dict[str, object] = {}
    # ``sampler`` stands for no such attribute; None in it means the global generator.
    own = getattr(sampler, "generator", sampler)
    if own is None or isinstance(own, torch.Generator):
        changes["generator"] = generator
    for name in NESTED:
        inner = getattr(sampler, name, None)
        if inner is not None:
            seeded = seeded_copy(inner, generator)
            if seeded is not inner:
                changes[name] = seeded
    if not changes:
        return sampler
    duplicate = copy.copy(sampler)
    for name, value in changes.items():
        setattr(duplicate, name, value)
    return duplicate


def samplers_of(loader: DataLoader[object]) -> list[object]:
    """Return the loader's samplers and those inside them, each once."""
    found: list[object] = []
    pending: list[object] = [loader.batch_sampler, loader.sampler]
    while pending:
        sampler = pending.pop(0)
        if sampler is None or any(sampler is other for other in found):
            continue
        found.append(sampler)
        pending.extend(getattr(sampler, name, None) for name in NESTED)
    return found


def find_distributed_sampler(loader: DataLoader[object]) -> DistributedSampler[object] | None:
    return next((s for s in samplers_of(loader) if isinstance(s, DistributedSampler)), None)


def initial_seed_of(loader: DataLoader[object]) -> int:
    """Return the seed of the loader's or its sampler's generator, else of torch's global generator."""
    for holder in (loader, *samplers_of(loader)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator.initial_seed()
    return torch.initial_seed()


def announce_epoch(loader: DataLoader[object], seed: int, epoch: int, seeded: bool) -> None:
    """Call ``set_epoch`` of the dataset and the samplers that have it.

    Where the order is ``seeded``, a dataset without ``set_epoch`` that holds a torch generator gets it seeded with
    ``seed + epoch``, so that every rank reads the same stream.
    """
    announce_epoch_to(loader.dataset, seed, epoch, seeded)
    for sampler in samplers_of(loader):
        _set_epoch(sampler, epoch)


def announce_epoch_to(dataset: object, seed: int, epoch: int, seeded: bool) -> None:
    """Announce an epoch to a dataset alone, as in a worker process."""
    _set_epoch(dataset, epoch)
    generator = getattr(dataset, "generator", None)
    if seeded and isinstance(generator, torch.Generator) and not hasattr(dataset, "set_epoch"):
        generator.manual_seed(epoch_seed(seed, epoch))


def _set_epoch(holder: Any, epoch: int) -> None:
    set_epoch = getattr(holder, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    elif isinstance(getattr(holder, "next_epoch", None), int):
        # Of MosaicML's streaming, which counts the iterations of a process.
        holder.next_epoch = epoch
