"""Random numbers drawn while data are read: a run that continues draws those of the run that was not interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

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


class AugmentedBatches(Augmented):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        assert type(indices) is list
        return [self[index] for index in indices]


class Shuffling(IterableDataset[Any]):
    """A stream with a buffer that shuffles by Python's generator, and rows as above; workers take stripes."""

    def __init__(self, n: int = 41) -> None:
        self.n = n
        self.epoch = -1.0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = float(epoch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        buffer: list[int] = []
        for number in range(first, self.n, step):
            buffer.append(number)
            if len(buffer) == 5:
                yield self.row(buffer.pop(random.randrange(5)))
        random.shuffle(buffer)
        for number in buffer:
            yield self.row(number)

    def row(self, number: int) -> torch.Tensor:
        return torch.tensor([number, *noise(), self.epoch])


def noisy_collate(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.stack(rows).flatten(), torch.tensor(noise())])


def shift(worker_id: int) -> None:
    """What the loader draws for its workers must be the same again, too."""
    worker = get_worker_info()
    assert worker is not None
    worker.dataset.shift = (worker.seed - worker_id) % 97 / 100  # type: ignore[attr-defined]


Make = Callable[[], PreparedLoader]
LOADERS: dict[str, Make] = {
    "map": lambda: prepare(DataLoader(Augmented(), 4, shuffle=True), 1, 2),
    "map, collate draws": lambda: prepare(DataLoader(Augmented(), 4, collate_fn=noisy_collate)),
    "map, workers": lambda: prepare(DataLoader(Augmented(), 3, shuffle=True, num_workers=2), 1, 2),
    "map, workers, getitems": lambda: prepare(
        DataLoader(AugmentedBatches(), 4, num_workers=2, prefetch_factor=3, worker_init_fn=shift)
    ),
    "map, workers, single items": lambda: prepare(DataLoader(Augmented(9), batch_size=None, num_workers=2)),
    "map, persistent workers": lambda: prepare(
        DataLoader(Augmented(), 4, shuffle=True, num_workers=2, persistent_workers=True)
    ),
    "stream": lambda: prepare(DataLoader(Shuffling(), 4), 1, 2),
    "stream, collate draws": lambda: prepare(DataLoader(Shuffling(), 4, collate_fn=noisy_collate)),
    "stream, workers": lambda: prepare(DataLoader(Shuffling(), 3, num_workers=2), 1, 2),
    "stream, collate draws in workers": lambda: prepare(
        DataLoader(Shuffling(), 4, num_workers=3, collate_fn=noisy_collate)
    ),
    "stream, persistent workers": lambda: prepare(
        DataLoader(Shuffling(), 4, num_workers=2, persistent_workers=True)
    ),
}


def set_generators(state: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def generators() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def trained(loader: PreparedLoader, epochs: int, saves: dict[int, Any] | None = None) -> list[Any]:
    """What a loop sees that draws as a model with dropout does; positions and generators after each step."""
    log: list[Any] = []
    while loader.epoch < epochs:
        for batch in loader:
            log.append((batch.tolist(), noise()))
            if saves is not None:
                saves[len(log)] = (loader.state_dict(), generators())
    return log


@pytest.mark.parametrize("name", LOADERS)
def test_a_run_that_continues_draws_the_numbers_of_the_uninterrupted_run(name):
    make = LOADERS[name]
    seed_all(0)
    saves: dict[int, Any] = {}
    whole = trained(make(), 2, saves)
    assert len({str(entry) for entry in whole}) == len(whole)
    seed_all(0)
    assert trained(make(), 2) == whole  # saving changes nothing
    steps = sorted(saves)[:-1]
    for stop in random.Random(name).sample(steps, 2 if "workers" in name else 4):
        state, rng = saves[stop]
        torch.manual_seed(0)  # the seed of the order where the state says no other
        loader = make()
        seed_all(1000 + stop)
        loader.load_state_dict(state)
        set_generators(rng)
        assert trained(loader, 2) == whole[stop:]


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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Augmented(), Shuffling()])
def test_reading_begins_without_drawing_from_the_generators_of_the_loop(dataset, workers):
    loader = prepare(DataLoader(dataset, 4, num_workers=workers), data_seed=0)
    seed_all(3)
    before = torch.get_rng_state()
    batches = iter(loader)
    next(batches)
    if workers or isinstance(dataset, Shuffling):
        assert torch.equal(torch.get_rng_state(), before)
    else:
        torch.set_rng_state(before)
        torch.rand(4)  # one number for each row
        after_rows = torch.get_rng_state()
        loader.set_epoch(0)
        torch.set_rng_state(before)
        next(iter(loader))
        assert torch.equal(torch.get_rng_state(), after_rows)


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
