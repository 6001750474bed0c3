"""The loaders of the audit: how each is made, and in which order its samples come, as lists made by plain torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

GLOBAL_BATCH = 8
FEATURES, CLASSES = 6, 4
EPOCHS = 2
# Workers as a script's own process starts them on Linux; processes of the pool have another default, which is slow.
WORKERS: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
Sample = tuple[int, torch.Tensor, int]


def sample(number: int, noise: bool) -> Sample:
    """A number, its features and its label. ``noise`` is drawn from the three global generators."""
    generator = torch.Generator().manual_seed(1000 + number)
    features = torch.randn(FEATURES, generator=generator)
    label = int(features.argmax()) % CLASSES
    if noise:
        features = features + 0.1 * (torch.randn(FEATURES) + random.random() + float(np.random.rand()))
    return number, features, label


class Samples(Dataset[Sample]):
    def __init__(self, count: int, noise: bool) -> None:
        self.count, self.noise = count, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Sample:
        return sample(number, self.noise)


class Stream(IterableDataset[Sample]):
    """All samples, beginning with another one in each epoch; worker processes take every n-th."""

    def __init__(self, count: int, noise: bool) -> None:
        self.count, self.noise = count, noise
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in rotated(self.count, self.epoch)[first::step]:
            yield sample(number, self.noise)


class Batches:
    """A batch sampler of the user's own: batches of ``sizes`` in turn, of an order that the epoch gives."""

    def __init__(self, count: int, sizes: tuple[int, ...]) -> None:
        self.count, self.sizes = count, sizes
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter(cut(mirrored(self.count, self.epoch), self.sizes))

    def __len__(self) -> int:
        return len(cut(list(range(self.count)), self.sizes))


def rotated(count: int, epoch: int) -> list[int]:
    return [(number + 7 * epoch) % count for number in range(count)]


def mirrored(count: int, epoch: int) -> list[int]:
    """Evens upwards, then odds downwards; the other way round in odd epochs."""
    order = [*range(0, count, 2), *reversed(range(1, count, 2))]
    return order[::-1] if epoch % 2 else order


def cut(order: list[int], sizes: tuple[int, ...]) -> list[list[int]]:
    batches: list[list[int]] = []
    while order:
        size = sizes[len(batches) % len(sizes)]
        batches.append(order[:size])
        order = order[size:]
    return batches


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def permuted(count: int, epoch: int, seed: int) -> list[int]:
    """What ``shuffle=True`` gives in torch's own loader, from a generator of the loader."""
    loader = DataLoader(range(count), batch_size=None, shuffle=True, generator=generator(seed))  # type: ignore[arg-type]
    return [list(loader) for _ in range(epoch + 1)][-1]


@dataclass(frozen=True)
class Kind:
    """A kind of loader.

    - ``make(world, noise)``: the loader that the script gives to ``prepare``, for so many ranks.
    - ``order(epoch, seed)``: of the samples.
    - ``steps(world)``: micro-batches of an epoch.
    - ``ordered``: false where each worker process has a stream of its own, so that the samples are exact
      and their order depends on the number of ranks.
    - ``even``: whether all micro-batches of all ranks have equally many samples. Otherwise losses are weighted.
    """

    make: Callable[[int, bool], DataLoader[Any]]
    order: Callable[[int, int], list[int]]
    options: dict[str, Any] = field(default_factory=dict)
    steps: Callable[[int], int] = lambda world: 10
    ordered: bool = True
    even: bool = False

    @property
    def splits(self) -> bool:
        return bool(self.options.get("split_batches", False))


def shuffled(count: int, **options: Any) -> Callable[[int, bool], DataLoader[Any]]:
    return lambda world, noise: DataLoader(
        Samples(count, noise),
        GLOBAL_BATCH // world,
        shuffle=True,
        generator=generator(torch.initial_seed()),  # of each rank another one
        **options,
    )


def stream(count: int, **options: Any) -> Callable[[int, bool], DataLoader[Any]]:
    return lambda world, noise: DataLoader(Stream(count, noise), GLOBAL_BATCH // world, **options)


def by_epoch(count: int, kept: int | None = None) -> Callable[[int, int], list[int]]:
    return lambda epoch, seed: permuted(count, epoch, seed)[:kept]


def in_turn(count: int) -> Callable[[int, int], list[int]]:
    return lambda epoch, _: rotated(count, epoch)


KINDS = {
    "shuffled": Kind(shuffled(80), by_epoch(80), even=True),
    "workers": Kind(shuffled(80, **WORKERS), by_epoch(80), even=True),
    "iterable": Kind(stream(75), in_turn(75), {"dispatch_batches": False}),
    "iterable, workers": Kind(stream(78, **WORKERS), in_turn(78), {"dispatch_batches": False}, ordered=False),
    "batch sampler": Kind(
        lambda world, noise: DataLoader(Samples(57, noise), batch_sampler=Batches(57, (4, 2, 3))),
        lambda epoch, _: mirrored(57, epoch),
        steps=lambda world: -(-19 // world),
    ),
    "split batch sampler": Kind(
        lambda world, noise: DataLoader(Samples(63, noise), batch_sampler=Batches(63, (8, 5, 7, 6))),
        lambda epoch, _: mirrored(63, epoch),
        {"split_batches": True},
    ),
    "drop last": Kind(shuffled(85, drop_last=True), by_epoch(85, 80), even=True),
    "ragged end": Kind(shuffled(75), by_epoch(75)),
    "split": Kind(
        lambda world, noise: DataLoader(
            Samples(75, noise), GLOBAL_BATCH, shuffle=True, generator=generator(torch.initial_seed())
        ),
        by_epoch(75),
        {"split_batches": True},
    ),
    "dispatched": Kind(shuffled(75), by_epoch(75), {"dispatch_batches": True}),
    "dispatched iterable": Kind(stream(75), in_turn(75)),
    "dispatched, workers": Kind(shuffled(75, **WORKERS), by_epoch(75), {"dispatch_batches": True}),
}
