"""Continue in the middle of an epoch: a loader without its first batches, and the options that it takes over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, cast

from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep import data
from lockstep.errors import ConfigError, UsageError

# The options of a loader that have nothing to do with which rows it reads.
CARRIED_OPTIONS = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def carried_options(loader: DataLoader[object]) -> dict[str, Any]:
    """Return those of ``CARRIED_OPTIONS`` that the loader has and that mean something for it."""
    options = {name: getattr(loader, name) for name in CARRIED_OPTIONS if hasattr(loader, name)}
    if loader.num_workers == 0:
        for name in ("prefetch_factor", "multiprocessing_context"):
            options.pop(name, None)
    return options


def skip_first_batches(dataloader: DataLoader[object], num_batches: int = 0) -> DataLoader[object]:
    """Return a loader that leaves out the first batches of another loader, in each iteration.

    Args:
        dataloader: A ``DataLoader``. If it is prepared, so is the result. Samples of a map-style dataset that are
            left out are not read. Those of an iterable dataset are read and discarded.
        num_batches: The number of batches.

    Raises:
        ConfigError: ``num_batches`` is negative.
        UsageError: the loader has fewer than ``num_batches`` batches.

    Examples:
        ```python
        import torch
        from lockstep import skip_first_batches

        loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2)
        rest = [batch.tolist() for batch in skip_first_batches(loader, 3)]
        assert rest == [[6, 7]]
        ```
    """
    if hasattr(dataloader, "skipping"):
        rest: DataLoader[object] = dataloader.skipping(num_batches)
        return rest
    check_skip(num_batches, data.lengths(dataloader)[0])
    options = carried_options(dataloader)
    options.update(collate_fn=dataloader.collate_fn)
    if data.is_iterable(dataloader):
        options.update(batch_size=dataloader.batch_size, drop_last=dataloader.drop_last)
        return LaterBatches(dataloader.dataset, num_batches, **options)
    if dataloader.batch_sampler is None:
        return DataLoader(
            dataloader.dataset,
            batch_size=None,
            sampler=LaterItems(dataloader.sampler, num_batches),
            **options,
        )
    return DataLoader(
        dataloader.dataset, batch_sampler=LaterItems(dataloader.batch_sampler, num_batches), **options
    )


def check_skip(num_batches: int, length: int | None) -> None:
    """Raise UsageError unless ``num_batches`` of a loader with ``length`` batches can be skipped."""
    if isinstance(num_batches, bool) or not isinstance(num_batches, int) or num_batches < 0:
        raise ConfigError(
            f"num_batches is {num_batches!r}, but must be 0 or more. Pass the number of batches to skip."
        )
    if length is not None and num_batches > length:
        raise UsageError(
            f"{num_batches} batches cannot be skipped: the loader has {length}. Pass a number below that: the "
            "batches of one process, within one epoch."
        )


class LaterItems(Sampler[Any]):
    """What ``sampler`` yields after its first ``skipped`` items."""

    def __init__(self, sampler: Sampler[object] | Iterable[object], skipped: int) -> None:
        self.sampler = sampler
        self.skipped = skipped

    @property
    def batch_size(self) -> int | None:
        """The ``batch_size`` of the sampler inside. None: it has none."""
        return getattr(self.sampler, "batch_size", None)

    @property
    def drop_last(self) -> bool:
        """Whether the sampler inside leaves out an incomplete last batch."""
        return getattr(self.sampler, "drop_last", False)

    def __iter__(self) -> Iterator[object]:
        return islice(iter(self.sampler), self.skipped, None)

    def __len__(self) -> int:
        return max(0, len(cast(Sized, self.sampler)) - self.skipped)


class LaterBatches(DataLoader[object]):
    """A loader over an iterable dataset that discards its first ``skipped`` batches."""

    def __init__(self, dataset: Dataset[object], skipped: int, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.skipped = skipped

    def __iter__(self) -> Iterator[object]:  # type: ignore[override]
        return islice(super().__iter__(), self.skipped, None)

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skipped)
