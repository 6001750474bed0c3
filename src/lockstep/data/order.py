"""One global order of samples or batches, a pure function of seed and epoch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lockstep.data.rng import draw_privately, epoch_generator, epoch_seed

# The attributes under which samplers hold other samplers.
NESTED = ("sampler", "batch_sampler")


@dataclass(frozen=True)
class GlobalOrder:
    """The order that ``sampler`` (of indices or of batches of indices) gives, the same on every rank.

    A sampler with a ``generator`` attribute, itself or inside, gets a generator seeded with
    ``seed + epoch``: with ``shuffle=True`` that is ``torch.randperm`` as ``DistributedSampler`` draws it.
    Any other sampler runs with the global generators of torch, Python and NumPy seeded likewise and
    restored afterwards.
    """

    sampler: Any
    seed: int

    def items(self, epoch: int) -> Iterator[Any]:
        """What the sampler yields in ``epoch``; the user's sampler is not modified."""
        sampler = seeded_copy(self.sampler, epoch_generator(self.seed, epoch))
        return draw_privately(sampler, epoch_seed(self.seed, epoch))

    def __len__(self) -> int:
        return len(self.sampler)


def seeded_copy(sampler: Any, generator: torch.Generator) -> Any:
    """``sampler`` with every ``generator`` in it replaced, on shallow copies; itself if it has none."""
    changes: dict[str, Any] = {}
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


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """The loader's samplers and those inside them, each once."""
    found: list[Any] = []
    pending = [loader.batch_sampler, loader.sampler]
    while pending:
        sampler = pending.pop(0)
        if sampler is None or any(sampler is other for other in found):
            continue
        found.append(sampler)
        pending.extend(getattr(sampler, name, None) for name in NESTED)
    return found


def find_distributed_sampler(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    return next((s for s in samplers_of(loader) if isinstance(s, DistributedSampler)), None)


def initial_seed_of(loader: DataLoader[Any]) -> int:
    """The seed of the loader's or its sampler's generator, else of torch's global generator."""
    for holder in (loader, *samplers_of(loader)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator.initial_seed()
    return torch.initial_seed()


def announce_epoch(loader: DataLoader[Any], seed: int, epoch: int) -> None:
    """Call ``set_epoch`` of the dataset and the samplers that have it.

    A dataset without ``set_epoch`` that holds a torch generator gets it seeded with ``seed + epoch``, so
    that every rank reads the same stream.
    """
    for holder in (loader.dataset, *samplers_of(loader)):
        if callable(getattr(holder, "set_epoch", None)):
            holder.set_epoch(epoch)
    generator = getattr(loader.dataset, "generator", None)
    if isinstance(generator, torch.Generator) and not hasattr(loader.dataset, "set_epoch"):
        generator.manual_seed(epoch_seed(seed, epoch))
