"""Random numbers drawn while data are read: a run that continues draws those of the run that was not interrupted."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lockstep import skip_first_batches
from lockstep.data_loader import PreparedLoader
from tests.data.helpers import Numbers, prepare, rows_of


def noise() -> list[float]:
    """A number of each global generator."""
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


class Augmented(Dataset[Any]):
    """Rows [index, three random numbers, epoch]."""

    def __init__(self, n: int = 22) -> None:
        self.n = n
        self.epoch = -1.0
        self.shift = 0.0

    def __len__(self) -> int:
        return self.n

    def set_epoch(self, epoch: int) -> None:
        self.epoch = float(epoch)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + self.shift, *noise(), self.epoch])


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def rows_and_noise(loader: PreparedLoader) -> list[Any]:
    return [row for batch in loader for row in batch.tolist()]


@pytest.mark.parametrize("options", [{}, {"data_seed": 5}])
def test_what_workers_draw_depends_on_the_batch_and_not_on_how_many_they_are(options):
    def rows(workers: int) -> list[Any]:
        seed_all(3)
        loader = prepare(DataLoader(Augmented(), 4, shuffle=True, num_workers=workers), **options)
        return [row for _ in range(2) for row in rows_and_noise(loader)]

    assert rows(1) == rows(3)
    drawn = [number for row in rows(2) for number in row[1:4]]
    assert len(set(drawn)) == len(drawn)


def test_ranks_and_epochs_draw_different_numbers_and_all_worlds_the_same_ones():
    def rows(rank: int, world: int) -> list[Any]:
        loader = prepare(DataLoader(Augmented(24), 4, shuffle=True, num_workers=1), rank, world, data_seed=5)
        return [row for _ in range(2) for row in rows_and_noise(loader)]

    alone, first, second = rows(0, 1), rows(0, 2), rows(1, 2)
    assert sorted(first + second) == sorted(alone)
    drawn = [row[1] for row in alone]
    assert len(set(drawn)) == len(drawn)


def test_workers_of_another_start_method_draw_the_same_numbers():
    def rows(method: str) -> list[Any]:
        loader = DataLoader(Augmented(6), 3, num_workers=1, multiprocessing_context=method)
        return rows_and_noise(prepare(loader, data_seed=5))

    assert rows("spawn") == rows("fork")


def test_without_workers_a_row_is_read_when_its_batch_is_asked_for():
    data = Numbers(8)
    asked = []
    for batch in prepare(DataLoader(data, 2)):
        asked.append(list(data.asked))
        assert asked[-1][-2:] == rows_of(batch)
    assert asked == [list(range(n)) for n in (2, 4, 6, 8)]


def test_a_copy_that_skips_draws_what_the_whole_epoch_would_draw_in_workers():
    def make() -> PreparedLoader:
        return prepare(DataLoader(Augmented(), 4, num_workers=2), data_seed=2)

    assert rows_and_noise(skip_first_batches(make(), 2)) == rows_and_noise(make())[8:]  # type: ignore[arg-type]
