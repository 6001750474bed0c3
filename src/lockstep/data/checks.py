"""What can be known of a loader before it is read: plan, lengths, and whether it can be dealt at all."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import replace
from typing import cast

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lockstep.config.handlers import DataLoaderConfiguration
from lockstep.config.world import ParallelDims
from lockstep.data.batch_sharding import ShardPlan
from lockstep.data.fingerprint import check_undivided
from lockstep.data.loader import PreparedLoader
from lockstep.data.map_reader import sample_count
from lockstep.data.order import find_distributed_sampler
from lockstep.errors import ConfigError, UsageError


def decide(
    loader: DataLoader[object], config: DataLoaderConfiguration, axes: ParallelDims
) -> tuple[ShardPlan, bool]:
    """Decide how the loader is dealt, and whether rank 0 dispatches it. Raises UsageError or ConfigError if it cannot
    be."""
    check_loader(loader, axes.data)
    if cuts_whole_batches(loader, config) and axes.data > 1:
        if config.dispatch_batches is False:
            raise ConfigError(
                "split_batches=True of a loader with batch_size=None lets rank 0 read each batch and give every rank "
                "its rows. Leave out dispatch_batches=False, or use split_batches=False."
            )
        # Rank 0 reads each batch as one process would, and every rank gets its rows.
        return plan_for(loader, config, 1, True), True
    dispatch = should_dispatch(loader, config, axes)
    plan = plan_for(loader, config, axes.data, dispatch)
    check_plan(loader, plan)
    return plan, dispatch


def cuts_whole_batches(loader: DataLoader[object], config: DataLoaderConfiguration) -> bool:
    """Return whether batches that the dataset makes itself are cut into rows."""
    return config.split_batches and loader.batch_size is None and batches_by_sampler(loader) is None


def is_iterable(loader: DataLoader[object]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def batches_by_sampler(loader: DataLoader[object]) -> Iterable[object] | None:
    """Return the sampler whose items are batches of indices, or None if the dataset makes batches itself."""
    if loader.batch_sampler is not None:
        return loader.batch_sampler
    return loader.sampler if isinstance(loader.sampler, BatchSampler) else None


def plan_for(
    loader: DataLoader[object], config: DataLoaderConfiguration, world_size: int, dispatch: bool
) -> ShardPlan:
    """Return how batches are dealt. Only map-style data that every rank reads can end unevenly, as in Accelerate."""
    sampler = None if is_iterable(loader) else batches_by_sampler(loader)
    plan = ShardPlan(
        world_size=world_size,
        batch_size=loader.batch_size,
        even_batches=config.even_batches or dispatch or is_iterable(loader),
        dispatched=dispatch,
        drop_last=bool(getattr(sampler, "drop_last", loader.drop_last)),
    )
    if sampler is not None:
        size = getattr(sampler, "batch_size", None)
        plan = replace(plan, batch_size=size if isinstance(size, int) else None)
    elif loader.batch_size is None:
        # Whatever the dataset yields is dealt as one piece.
        return replace(plan, batch_size=1)
    return replace(plan, split_batches=config.split_batches)


def should_dispatch(loader: DataLoader[object], config: DataLoaderConfiguration, axes: ParallelDims) -> bool:
    """Streams are read once, because ranks that share one model need the same rows too."""
    if axes.data == 1 and not axes.splits_model:
        return bool(config.dispatch_batches)
    if config.dispatch_batches is None:
        return is_iterable(loader)
    return config.dispatch_batches


def lengths(loader: DataLoader[object]) -> tuple[int | None, int | None]:
    """Return numbers of batches and of samples in one pass over the whole order (None: not known)."""
    try:
        if is_iterable(loader):
            samples = len(loader.dataset)  # type: ignore[arg-type]
            size = loader.batch_size
            if size is None:
                return samples, None
            return (samples // size if loader.drop_last else -(-samples // size)), samples
        sampler = batches_by_sampler(loader)
        if sampler is None:
            return len(loader.sampler), None  # type: ignore[arg-type]
        return len(cast(Sized, sampler)), sample_count(sampler)
    except (TypeError, NotImplementedError):
        return None, None


def check_loader(loader: object, world_size: int) -> None:
    if isinstance(loader, PreparedLoader):
        raise UsageError(
            "This loader has been prepared already. Pass the torch DataLoader to prepare(), and only once."
        )
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"A torch DataLoader is needed, but this is a {type(loader).__name__}. Wrap it in a torch DataLoader."
        )
    batches, samples = lengths(loader)
    if batches == 0:
        raise UsageError(
            f"The loader has length 0: {samples if samples is not None else 'no'} samples, batch size "
            f"{loader.batch_size}, drop_last={loader.drop_last}. Give it data, or set drop_last=False."
        )
    if world_size == 1:
        return
    if find_distributed_sampler(loader) is not None:
        raise UsageError(
            "The loader has a DistributedSampler, but prepare() gives each process its part already. "
            "Remove the sampler; use shuffle=True for a shuffled order."
        )
    check_undivided(loader, world_size)
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        raise ConfigError(
            f"in_order=False with {loader.num_workers} workers gives batches in changing order, so the batches "
            f"of {world_size} processes do not form one global batch. Use in_order=True."
        )


def check_plan(loader: DataLoader[object], plan: ShardPlan) -> None:
    batches, _ = lengths(loader)
    # No rank has more batches than rank 0.
    if batches is not None and plan.length(batches, 0) == 0:
        raise UsageError(
            f"With drop_last=True the loader has {batches} full batches, which is less than one for each of "
            f"{plan.world_size} processes. Use drop_last=False, a smaller batch size than {plan.batch_size}, or "
            "fewer processes."
        )


Lengths = tuple[int | None, ...]


def check_lengths(own: Lengths, main: Lengths, rank: int, dispatch: bool) -> None:
    """Raise UsageError where a rank that reads for itself has other data than rank 0."""
    if own != main and not dispatch:
        raise UsageError(
            f"The loader of rank {rank} has {own[0]} batches of {own[1]} samples, but rank 0 has {main[0]} of "
            f"{main[1]}. Give every rank the whole data: prepare() chooses the part of each rank."
        )
