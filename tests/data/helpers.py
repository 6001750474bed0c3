"""Datasets and shortcuts for the tests of loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lockstep import DataLoaderConfiguration
from lockstep.data import prepare_loader
from lockstep.data_loader import PreparedLoader
from lockstep.runtime import BatchCounts, Runtime, StepState

ALONE = Runtime(
    rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"), backend=None
)


class Numbers(Dataset[int]):
    """0 to n - 1; remembers which were asked for in this process."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index


class Stream(IterableDataset[int]):
    """0 to n - 1; with ``striped``, each worker process yields every n-th only."""

    def __init__(self, n: int, striped: bool = False) -> None:
        self.n = n
        self.striped = striped
        self.first = 0

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        if self.striped and worker is not None:
            return iter(range(self.first + worker.id, self.first + self.n, worker.num_workers))
        return iter(range(self.first, self.first + self.n))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


def prepare(loader: DataLoader[Any], rank: int = 0, world: int = 1, **options: Any) -> PreparedLoader:
    """One rank's loader, in this process; iterable datasets are not dispatched."""
    options.setdefault("dispatch_batches", False)
    step = options.pop("step", None) or StepState()
    return prepare_loader(
        loader,
        runtime=ALONE,
        step=step,
        config=DataLoaderConfiguration(**options),
        rank=rank,
        world_size=world,
    )


def consume(loader: PreparedLoader) -> list[tuple[list[int], BatchCounts | None, bool]]:
    """Rows, counts and end-of-data flag of each batch."""
    step = loader._parts.step
    return [(rows_of(batch), step.counts, step.end_of_data) for batch in loader]


def rows_of(batch: Any) -> list[int]:
    return batch.flatten().tolist() if isinstance(batch, torch.Tensor) else list(batch)


def real_rows_per_step(make: Callable[[], DataLoader[Any]], world: int, **options: Any) -> list[list[int]]:
    """The samples of each step, ranks joined in order, as gather_for_metrics would return them."""
    ranks = [consume(prepare(make(), rank, world, **options)) for rank in range(world)]
    steps = []
    for index in range(max(len(batches) for batches in ranks)):
        rows: list[int] = []
        for rank, batches in enumerate(ranks):
            if index < len(batches):
                batch, counts, _ = batches[index]
                assert counts is not None
                assert counts.rows[rank] == len(batch)
                rows += batch[: counts.real[rank]]
        steps.append(rows)
    return steps


def place_of(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a loader without the states of generators, which are tensors."""
    return {name: value for name, value in state.items() if name != "draws"}


def chunks(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def shuffled(n: int, seed: int) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
