"""The global order against torch's own samplers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lockstep.data import (
    GlobalOrder,
    announce_epoch,
    draw_privately,
    find_distributed_sampler,
    initial_seed_of,
)


def drawn(order: GlobalOrder, epoch: int) -> list[Any]:
    return list(order.batches(epoch, behind=0, beginning=0)[1])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_shuffling_is_randperm_of_seed_plus_epoch_as_in_distributed_sampler(epoch):
    order = drawn(GlobalOrder(RandomSampler(range(20)), seed=7), epoch)
    assert order == torch.randperm(20, generator=generator(7 + epoch)).tolist()
    theirs = DistributedSampler(range(20), num_replicas=1, rank=0, shuffle=True, seed=7)
    theirs.set_epoch(epoch)
    assert order == list(theirs)


@pytest.mark.parametrize(
    "make",
    [
        lambda g: RandomSampler(range(30), replacement=True, num_samples=50, generator=g),
        lambda g: SubsetRandomSampler([3, 1, 4, 1, 5, 9, 2, 6], generator=g),
        lambda g: WeightedRandomSampler([0.1, 0.2, 0.3, 0.4], 12, generator=g),
        lambda g: BatchSampler(RandomSampler(range(30), generator=g), 4, drop_last=False),
    ],
)
def test_torch_samplers_get_the_generator_of_the_epoch_and_are_not_modified(make):
    own = generator(123)
    before = own.get_state()
    order = GlobalOrder(make(own), seed=3)
    assert drawn(order, 2) == list(make(generator(5)))
    assert torch.equal(own.get_state(), before)


class GlobalRandomSampler:
    """Draws from every global generator."""

    def __iter__(self):
        for _ in range(600):
            yield random.randrange(1000), int(np.random.randint(1000)), int(torch.randint(1000, ()))

    def __len__(self):
        return 600


def test_a_sampler_of_global_randomness_depends_on_seed_and_epoch_alone():
    order = GlobalOrder(GlobalRandomSampler(), seed=11)
    random.seed(1)
    first = drawn(order, 0)
    random.seed(2)
    torch.manual_seed(99)
    assert drawn(order, 0) == first
    assert drawn(order, 1) != first
    assert len(set(first)) > 500


def test_the_global_generators_are_untouched_by_drawing():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    expected = torch.rand(2).tolist(), random.random(), np.random.rand()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    drawing = GlobalOrder(GlobalRandomSampler(), seed=1).batches(0, 0, 0)[1]
    next(drawing)
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == expected


def test_drawing_in_blocks_equals_drawing_at_once():
    sampler = GlobalRandomSampler()
    whole = list(draw_privately(sampler, 5, block_size=10_000))
    assert list(draw_privately(sampler, 5, block_size=7)) == whole


def test_an_endless_sampler_can_be_drawn_from():
    def endless():
        while True:
            yield random.randrange(10)

    items = draw_privately(endless(), 0)
    assert len([next(items) for _ in range(1000)]) == 1000


def test_a_distributed_sampler_is_found_inside_a_batch_sampler():
    inner = DistributedSampler(range(8), num_replicas=2, rank=0)
    loader = DataLoader(range(8), batch_sampler=BatchSampler(inner, 2, False))
    assert find_distributed_sampler(loader) is inner
    assert find_distributed_sampler(DataLoader(range(8))) is None


def test_the_seed_is_the_loaders_generators_then_the_samplers_then_torchs():
    assert initial_seed_of(DataLoader(range(8), shuffle=True, generator=generator(5))) == 5
    assert initial_seed_of(DataLoader(range(8), sampler=RandomSampler(range(8), generator=generator(6)))) == 6
    torch.manual_seed(7)
    assert initial_seed_of(DataLoader(range(8), shuffle=True)) == 7


class EpochAware(SequentialSampler):
    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_set_epoch_reaches_the_samplers_and_the_dataset():
    class Data(list):
        epoch = -1

        def set_epoch(self, epoch):
            self.epoch = epoch

    data = Data(range(8))
    sampler = EpochAware(data)
    announce_epoch(
        DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False)), seed=0, epoch=4, seeded=False
    )
    assert (sampler.epoch, data.epoch) == (4, 4)
