"""Loaders that scripts construct by themselves, by the names that Accelerate's have.

``accelerator.prepare`` makes a ``PreparedLoader`` of a plain ``DataLoader``, which deals samples to the ranks and
knows its position. These here deal nothing: each process reads what its own dataset and sampler give. ``isinstance``
takes prepared loaders for them as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, Sampler

from lockstep.comm.functional import slice_tensors
from lockstep.comm.tree import concatenate, find_batch_size, send_to_device
from lockstep.config.enums import RNGType
from lockstep.data.loader import PreparedLoader
from lockstep.data.skip import check_skip
from lockstep.errors import ConfigError
from lockstep.runtime import process
from lockstep.runtime.seed import synchronize_rng_states
from lockstep.utils.loader_adapter import (
    DataLoaderAdapter,
    DataLoaderStateMixin,
    get_sampler,
    state_of_latest,
)
from lockstep.utils.operations import broadcast, broadcast_object_list, get_data_structure, initialize_tensors


class _OrPrepared(type):
    """A class of loaders to which ``isinstance`` counts those prepared loaders that do what it does."""

    def __instancecheck__(cls, instance: object) -> bool:
        if isinstance(instance, PreparedLoader):
            return vars(cls).get("_dispatches") is instance.dispatches
        return issubclass(type(instance), cls)


class _OwnLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """What the constructed loaders share: an iteration that is one batch ahead, so that it knows the last one."""

    _drop_last = False

    def _ahead(self, batches: Iterator[object], skipped: int = 0) -> Iterator[object]:
        """Batches; before the last one is handed out, ``end_of_dataloader`` is True."""
        self.begin()
        try:
            batches = islice(batches, skipped, None)
            missing = object()
            batch = next(batches, missing)
            while batch is not missing:
                self._update_state_dict()
                following = next(batches, missing)
                if following is missing:
                    self.end_of_dataloader = True
                    self._update_state_dict()
                yield batch
                batch = following
        finally:
            self.end()

    def skipping(self, num_batches: int) -> Any:
        """Return this loader without its first batches, in each iteration.

        Args:
            num_batches: The number of batches, in addition to those that are left out already.

        Raises:
            ConfigError: ``num_batches`` is negative.
            UsageError: the loader has fewer batches.

        Examples:
            ```python
            from lockstep.data_loader import DataLoaderShard

            loader = DataLoaderShard(range(6), batch_size=2).skipping(2)
            assert [batch.tolist() for batch in loader] == [[4, 5]]
            ```
        """
        check_skip(num_batches, len(self) if hasattr(self.dataset, "__len__") else None)
        other = copy.copy(self)
        other.skip_batches += num_batches  # type: ignore[attr-defined]
        return other

    @property
    def total_batch_size(self) -> int | None:
        """The number of rows of a batch of all processes, as a ``BatchSamplerShard`` tells it. None: it varies."""
        sampler = self.sampler if isinstance(self.sampler, BatchSampler) else self.batch_sampler
        size: int | None = getattr(sampler, "batch_size", None)
        if size is None or getattr(sampler, "split_batches", False):
            return size
        return size * int(getattr(sampler, "num_processes", 1))

    @property
    def total_dataset_length(self) -> int:
        """The number of samples of all processes."""
        found = getattr(self.dataset, "total_length", None)
        return len(self.dataset) if found is None else int(found)

    def get_sampler(self) -> Sampler[int] | Iterable[int]:
        """Return the sampler that draws the indices of samples.

        Examples:
            ```python
            import torch
            from lockstep.data_loader import DataLoaderShard

            loader = DataLoaderShard(range(4), batch_size=2)
            assert isinstance(loader.get_sampler(), torch.utils.data.SequentialSampler)
            ```
        """
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Let ``sampler`` draw the indices of samples from the next iteration on.

        Examples:
            ```python
            from lockstep.data_loader import DataLoaderShard

            loader = DataLoaderShard(range(4), batch_size=2)
            loader.set_sampler([3, 2, 1, 0])
            assert [batch.tolist() for batch in loader] == [[3, 2], [1, 0]]
            ```
        """
        if isinstance(self.sampler, BatchSampler):
            self.sampler.sampler = sampler
            return
        holder = self.batch_sampler
        while hasattr(holder, "batch_sampler"):
            holder.sampler = sampler
            holder = holder.batch_sampler
        holder.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers, or the dataset if they have no ``set_epoch``, that the next iteration is epoch
        ``epoch``.

        Examples:
            ```python
            from lockstep.data_loader import DataLoaderShard, SeedableRandomSampler

            sampler = SeedableRandomSampler(range(8), data_seed=42)
            loader = DataLoaderShard(range(8), sampler=sampler, batch_size=8)
            loader.set_epoch(1)
            (order,) = [batch.tolist() for batch in loader]
            sampler.set_epoch(1)
            assert list(sampler) == order
            ```
        """
        self.iteration = epoch
        holder, was_set = self.batch_sampler, False
        while holder is not None:
            parts: list[object] = [holder, getattr(holder, "sampler", None)]
            for one in parts:
                if hasattr(one, "set_epoch"):
                    one.set_epoch(epoch)
                    was_set = True
            holder = getattr(holder, "batch_sampler", None)
        if not was_set and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class DataLoaderShard(_OwnLoader, metaclass=_OrPrepared):
    """A loader of the samples that this process's own dataset and sampler give. It knows which batch is its last.

    It does not share samples out to ranks: ``accelerator.prepare`` does.

    Args:
        dataset: The dataset of this process.
        device: The device to which batches go. None: they stay on the CPU.
        rng_types: Names of random number generators that get the states of rank 0 before each iteration; see
            ``synchronize_rng_states``.
        synchronized_generator: The generator that ``"generator"`` in ``rng_types`` means.
        skip_batches: The number of batches that are read and left out at the beginning of each iteration.
        use_stateful_dataloader: Let torchdata's ``StatefulDataLoader`` read the data. It has a ``state_dict``.
        torch_device_mesh: Ignored: each process reads its own data.
        iteration: The number of the first epoch.
        kwargs: Further arguments of ``torch.utils.data.DataLoader``.

    Raises:
        ConfigError: ``skip_batches`` is negative.
        ImportError: ``use_stateful_dataloader`` is True, and torchdata is not installed.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.data_loader import DataLoaderShard

        accelerator = Accelerator()
        loader = DataLoaderShard(torch.arange(8), device=accelerator.device, batch_size=4)
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        ```
    """

    _dispatches = False

    def __init__(
        self,
        dataset: object,
        device: torch.device | str | int | None = None,
        rng_types: Iterable[str | RNGType] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: object = None,
        iteration: int = 0,
        **kwargs: object,
    ) -> None:
        check_skip(skip_batches, None)
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.gradient_state = state_of_latest()
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.iteration = iteration

    def __iter__(self) -> Iterator[Any]:
        if self.rng_types is not None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self.set_epoch(self.iteration)
        for batch in self._ahead(iter(self.base_dataloader), self.skip_batches):
            placed = batch
            if self.device is not None:
                placed = send_to_device(batch, self.device, non_blocking=self._non_blocking)
            yield placed
        self.iteration += 1


class DataLoaderDispatcher(_OwnLoader, metaclass=_OrPrepared):
    """A loader that rank 0 reads for all ranks. Each rank gets its slice of every batch. Iterate on every rank.

    Samples of the first round complete the last one, so that all slices have equally many rows.

    Args:
        dataset: The dataset. Only rank 0 reads it.
        split_batches: A batch of the loader is shared by all ranks. Otherwise each rank gets a batch of this size.
        skip_batches: The number of batches that are read and left out at the beginning of each iteration.
        use_stateful_dataloader: Let torchdata's ``StatefulDataLoader`` read the data. It has a ``state_dict``.
        slice_fn: A function ``f(batch, slice, process_index=..., num_processes=...)`` that cuts a batch. None:
            tensors [n, ...] are cut along dim 0.
        torch_device_mesh: Refused. ``accelerator.prepare`` knows which ranks share a model.
        kwargs: Further arguments of ``torch.utils.data.DataLoader``.

    Raises:
        ConfigError: ``skip_batches`` is negative, or ``torch_device_mesh`` is given.
        ImportError: ``use_stateful_dataloader`` is True, and torchdata is not installed.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.data_loader import DataLoaderDispatcher

        accelerator = Accelerator()
        loader = DataLoaderDispatcher(torch.arange(8), split_batches=True, batch_size=4)
        rows = [len(batch) for batch in loader]  # rank 0 reads, and sends each its slice
        assert rows == [4 // accelerator.num_processes] * 2
        ```
    """

    _dispatches = True

    def __init__(
        self,
        dataset: object,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., object] | None = None,
        torch_device_mesh: object = None,
        **kwargs: object,
    ) -> None:
        check_skip(skip_batches, None)
        if torch_device_mesh is not None:
            raise ConfigError(
                "torch_device_mesh says which ranks share a model. Leave it out, and pass a plain DataLoader to "
                "accelerator.prepare(), which knows these ranks."
            )
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.split_batches = split_batches
        self.skip_batches = skip_batches
        self.gradient_state = state_of_latest()
        self.state = process.start_runtime()
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.slice_fn = slice_fn or _sliced
        self.iteration = 0

    def __iter__(self) -> Iterator[Any]:
        self.set_epoch(self.iteration)
        runtime = self.state
        for whole in self._ahead(self._rounds(), self.skip_batches):
            size = find_batch_size(whole)
            share = -(-size // runtime.world_size)
            part = slice(runtime.rank * share, (runtime.rank + 1) * share)
            yield self.slice_fn(whole, part, process_index=runtime.rank, num_processes=runtime.world_size)
        self.iteration += 1

    def _rounds(self) -> Iterator[object]:
        """The batches of all processes, as rank 0 reads them, on every rank."""
        runtime = self.state
        per_round = 1 if self.split_batches else runtime.world_size
        source = iter(self.base_dataloader) if runtime.is_main else iter(())
        first: object = None
        while True:
            read = list(islice(source, per_round))
            whole = _concatenated(read)
            structure = None if whole is None else get_data_structure(whole)
            [structure] = broadcast_object_list([structure])
            if structure is None:
                return
            if runtime.world_size > 1:
                whole = initialize_tensors(structure) if whole is None else whole
                whole = broadcast(send_to_device(whole, runtime.device, non_blocking=self._non_blocking))
            else:
                whole = send_to_device(whole, runtime.device, non_blocking=self._non_blocking)
            size = find_batch_size(whole)
            first = whole if first is None else first
            missing = -size % runtime.world_size
            full = self.total_batch_size
            if self._drop_last and full is not None and size < full:
                return
            if missing and not self._drop_last:
                whole = _completed(whole, first, missing)
            yield whole

    @property
    def total_batch_size(self) -> int | None:
        """The number of rows of a batch of all ranks. None: it varies."""
        size: int | None = self.base_dataloader.batch_size
        return size if size is None or self.split_batches else size * self.state.world_size

    def __len__(self) -> int:
        batches = len(self.base_dataloader)
        if self.split_batches:
            return batches
        rounds, rest = divmod(batches, self.state.world_size)
        return rounds if self._drop_last or not rest else rounds + 1


class SkipDataLoader(_OwnLoader):
    """A loader that reads its first batches and leaves them out, in each iteration.

    Args:
        dataset: The dataset.
        skip_batches: The number of batches that are left out.
        use_stateful_dataloader: Let torchdata's ``StatefulDataLoader`` read the data. It has a ``state_dict``.
        kwargs: Further arguments of ``torch.utils.data.DataLoader``.

    Raises:
        ConfigError: ``skip_batches`` is negative.
        ImportError: ``use_stateful_dataloader`` is True, and torchdata is not installed.

    Examples:
        ```python
        from lockstep.data_loader import SkipDataLoader

        loader = SkipDataLoader(range(6), skip_batches=2, batch_size=2)
        assert [batch.tolist() for batch in loader] == [[4, 5]]
        ```
    """

    def __init__(
        self, dataset: object, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: object
    ) -> None:
        check_skip(skip_batches, None)
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches
        self.gradient_state = state_of_latest()

    def __iter__(self) -> Iterator[Any]:
        return self._ahead(iter(self.base_dataloader), self.skip_batches)

    def __len__(self) -> int:
        return max(0, len(self.base_dataloader) - self.skip_batches)


def _sliced(
    data: object, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> object:
    return slice_tensors(data, tensor_slice)


def _concatenated(batches: list[object]) -> object:
    """Batches as one; None: there is none."""
    return None if not batches else batches[0] if len(batches) == 1 else concatenate(batches)


def _completed(batch: object, first: object, missing: int) -> object:
    """A batch with ``missing`` more rows, taken from the beginning of the first batch."""
    rows = find_batch_size(first)
    parts = [batch]
    while missing > 0:
        parts.append(slice_tensors(first, slice(0, min(missing, rows))))
        missing -= rows
    return concatenate(parts)
