"""Names that scripts import from ``accelerate.data_loader``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from lockstep.data.batch_sharding import ShardPlan, grouped, rounds
from lockstep.data.drawn import SeedableRandomSampler
from lockstep.data.loader import PreparedLoader
from lockstep.data.prepare import prepare_data_loader
from lockstep.data.skip import LaterItems, skip_first_batches
from lockstep.errors import ConfigError
from lockstep.utils.loader_adapter import DataLoaderAdapter, DataLoaderStateMixin, get_sampler
from lockstep.utils.loaders import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "PreparedLoader",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]


class BatchSamplerShard(BatchSampler):
    """The batches of indices of one process, out of the batches of all processes.

    Process p of N gets batches p, p + N, p + 2N and so on. ``prepare`` shares batches out in the same way.

    Args:
        batch_sampler: The batches of all processes.
        num_processes: The number of processes, N.
        process_index: The number of this process, p, from 0.
        split_batches: Cut each batch into N slices, and give process p the p-th one.
        even_batches: Complete the last round with samples from the beginning, so that all processes get equally many
            batches. If ``batch_sampler`` has no ``batch_size``, it is completed with whole batches. With
            ``split_batches``, a short last batch is completed until N divides it.

    Raises:
        ValueError: with ``split_batches``, batches have no ``batch_size``, or N does not divide it.

    Examples:
        ```python
        from torch.utils.data import BatchSampler, SequentialSampler
        from lockstep.data_loader import BatchSamplerShard

        batches = BatchSampler(SequentialSampler(range(8)), batch_size=2, drop_last=False)
        shard = BatchSamplerShard(batches, num_processes=2, process_index=1)
        assert list(shard) == [[2, 3], [6, 7]]
        ```
    """

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches and self.batch_size is None:
            raise ConfigError(
                f"split_batches=True cuts each batch into {num_processes} equal slices, but "
                f"{type(batch_sampler).__name__} has no batch_size. Give it the attribute batch_size, or use "
                "split_batches=False."
            )
        self._plan()

    def _plan(self) -> ShardPlan:
        return ShardPlan(
            self.num_processes, self.batch_size, self.split_batches, self.even_batches, self.drop_last
        )

    @property
    def total_length(self) -> int:
        """The number of batches of all processes."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        samples: object = getattr(self.batch_sampler, "sampler", None)
        known = len(samples) if hasattr(samples, "__len__") else None
        return self._plan().length(self.total_length, self.process_index, known)

    def __iter__(self) -> Iterator[list[int]]:
        for one in rounds(self.batch_sampler, self._plan()):
            if one.parts[self.process_index]:
                yield one.parts[self.process_index]


class IterableDatasetShard(IterableDataset[object]):
    """The samples of one process, out of an iterable dataset.

    In each round, every process takes ``batch_size`` samples: first process 0, then process 1 and so on.

    Args:
        dataset: The samples of all processes.
        batch_size: The number of samples of one process in a round.
        drop_last: Leave out the last round if it is not complete. Otherwise samples of the first round complete it.
        num_processes: The number of processes.
        process_index: The number of this process, from 0.
        split_batches: ``batch_size`` is the number of samples of all processes in a round.

    Raises:
        ValueError: with ``split_batches``, ``num_processes`` does not divide ``batch_size``.

    Examples:
        ```python
        from lockstep.data_loader import IterableDatasetShard

        shard = IterableDatasetShard(range(8), batch_size=2, num_processes=2, process_index=1)
        shard.set_epoch(0)  # for datasets that shuffle
        assert list(shard) == [2, 3, 6, 7]
        ```
    """

    def __init__(
        self,
        dataset: Iterable[object],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise ConfigError(
                f"split_batches=True cuts batches of {batch_size} into {num_processes} equal slices, but "
                f"{batch_size} is not a multiple of {num_processes}. Use a multiple of {num_processes}."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches

    @property
    def _rows(self) -> int:
        """Of one process in a round."""
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset which epoch comes next, if it has ``set_epoch``.

        Args:
            epoch: The number of the epoch, from 0. A ``generator`` of a dataset without ``set_epoch`` is seeded with
                it.
        """
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        samples, whole = len(self.dataset), self._rows * self.num_processes  # type: ignore[arg-type]
        return (samples // whole if self.drop_last else -(-samples // whole)) * self._rows

    def __iter__(self) -> Iterator[Any]:
        whole, start = self._rows * self.num_processes, self.process_index * self._rows
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator):
            generator.manual_seed(getattr(self, "epoch", 0))
        first: list[object] = []
        for samples in grouped(self.dataset, whole, self.drop_last):
            first = first or samples
            yield from islice(chain(samples, cycle(first)), start, start + self._rows)


class SkipBatchSampler(LaterItems):
    """A sampler of batches without its first batches.

    Args:
        batch_sampler: The sampler of batches.
        skip_batches: The number of batches that are left out at the beginning of each iteration.

    Examples:
        ```python
        from torch.utils.data import BatchSampler, SequentialSampler
        from lockstep.data_loader import SkipBatchSampler

        batches = BatchSampler(SequentialSampler(range(6)), batch_size=2, drop_last=False)
        assert list(SkipBatchSampler(batches, skip_batches=2)) == [[4, 5]]
        ```
    """

    def __init__(self, batch_sampler: BatchSampler, skip_batches: int = 0) -> None:
        super().__init__(batch_sampler, skip_batches)
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    @property
    def total_length(self) -> int:
        """The number of batches of the sampler inside, with those that are left out."""
        return len(self.batch_sampler)
