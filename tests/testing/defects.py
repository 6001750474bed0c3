"""`make` functions with one planted defect each, that shows on several ranks only; and some that cannot be checked."""

from __future__ import annotations

import itertools
import os
import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.testing.models import BATCHES, Made, cross_entropy, mlp

CALLS = itertools.count()


def world() -> int:
    return int(os.environ["WORLD_SIZE"])


def rank() -> int:
    return int(os.environ["RANK"])


class DoubledGradient(nn.Module):
    """Of what comes before it, the gradient is multiplied by the number of ranks."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * world())
        return x * 1.0


def gradient_times_ranks() -> Made:
    model, _, batches, loss = mlp()
    assert isinstance(model, nn.Sequential)
    model[3] = nn.Sequential(DoubledGradient(), nn.ReLU())
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batches, loss


def rate_times_ranks() -> Made:
    model, _, batches, loss = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1 * world()), batches, loss


def batch_read_twice() -> Made:
    model, optimizer, batches, loss = mlp()
    if world() > 1:
        batches[3] = batches[2]
    return model, optimizer, batches, loss


# What cannot be checked ---------------------------------------------------------------------------------------


def three_values() -> object:
    return mlp()[:3]


def batches_as_an_iterator() -> object:
    model, optimizer, batches, loss = mlp()
    return model, optimizer, iter(batches), loss


def number(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    return float(cross_entropy(model, batch))


def loss_as_a_number() -> object:
    model, optimizer, batches, _ = mlp()
    return model, optimizer, batches, number


def rows_as_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def loss_of_rows() -> object:
    model, optimizer, batches, _ = mlp()
    return model, optimizer, batches, rows_as_loss


def tuples_without_loss() -> object:
    model, optimizer, batches, _ = mlp()
    return model, optimizer, batches, None


def short_stream() -> object:
    model, optimizer, batches, loss = mlp()
    return model, optimizer, torch.utils.data.DataLoader(Stream(batches[:2]), batch_size=None), loss


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, batches: list[object]) -> None:
        self.batches = batches

    def __iter__(self) -> object:
        return iter(self.batches)


def fails_on_rank_1() -> object:
    if rank() == 1:
        raise ZeroDivisionError("planted in make")
    return mlp()


def fails_everywhere() -> object:
    raise KeyError("planted everywhere")


def sleep_in_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = cross_entropy(model, batch)
    if rank() == 1:
        named_sleep()
    return loss


def named_sleep() -> None:
    time.sleep(1000)


def hangs_on_rank_1() -> object:
    model, optimizer, batches, _ = mlp()
    return model, optimizer, batches, sleep_in_loss


def other_weights_each_time() -> object:
    model, optimizer, batches, loss = mlp()
    assert isinstance(model, nn.Sequential)
    nn.init.constant_(model[0].bias, float(next(CALLS)))
    return model, optimizer, batches, loss


def unseeded_data() -> object:
    model, optimizer, batches, loss = mlp()
    draw = np.random.default_rng()
    noise = [torch.from_numpy(draw.random(batches[0][0].shape)).float() for _ in range(BATCHES)]
    return model, optimizer, [(x + more, y) for (x, y), more in zip(batches, noise, strict=True)], loss


class Noise:
    """A loss with noise on its inputs, from a generator of its own."""

    def __init__(self, generator: torch.Generator, seeds: bool = False) -> None:
        self.generator = generator
        self.seeds = seeds
        self.number = 0

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        if self.seeds:
            ranks = int(os.environ.get("WORLD_SIZE", "1"))
            self.generator.manual_seed(self.number * ranks + rank())
            self.number += 1
        return cross_entropy(model, (x + torch.randn(x.shape, generator=self.generator), y))


def noise_of_torch(seeds: bool = False) -> Made:
    model, optimizer, batches, _ = mlp()
    return model, optimizer, batches, Noise(torch.Generator().manual_seed(1), seeds)
