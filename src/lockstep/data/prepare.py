"""From the user's ``DataLoader`` to a ``PreparedLoader``: checks, seed, reader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep.comm.collectives import Communicator, raise_on_all_ranks
from lockstep.config.handlers import DataLoaderConfiguration
from lockstep.config.world import ParallelDims
from lockstep.data.batch_sharding import ShardPlan
from lockstep.data.checks import Lengths, batches_by_sampler, check_lengths, decide, is_iterable, lengths
from lockstep.data.dispatch import dispatched
from lockstep.data.drawn import draws_nothing, generators_of, stateful_samplers, with_seedable
from lockstep.data.fingerprint import check_same, fingerprint_of
from lockstep.data.loader import PreparedLoader
from lockstep.data.loader_parts import LoaderParts
from lockstep.data.map_reader import MapReader, ShardedBatches
from lockstep.data.order import GlobalOrder, initial_seed_of
from lockstep.data.pinned import batch_mover
from lockstep.data.readers import Reader
from lockstep.data.rng import States
from lockstep.data.skip import carried_options
from lockstep.data.stream import ShardedStream, as_it_is
from lockstep.data.stream_reader import StreamReader
from lockstep.errors import ConfigError, UsageError
from lockstep.runtime.process import Runtime, start_runtime
from lockstep.runtime.seed import check_rng_types
from lockstep.runtime.step import StepState


def prepare_loader(
    loader: DataLoader[object],
    *,
    runtime: Runtime,
    step: StepState,
    config: DataLoaderConfiguration,
    communicator: Communicator | None = None,
    device: torch.device | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    rng_types: Sequence[Any] | None = None,
    axes: ParallelDims | None = None,
) -> PreparedLoader:
    """Return this rank's part of ``loader``.

    ``device``: where batches go (None: they stay). ``rank`` and ``world_size`` stand in for those of
    ``runtime``. ``axes``: how the ranks share one model; those that do get the same batches. With a
    ``communicator`` and several ranks this is a collective call.

    Raises:
        UsageError: the loader is empty, smaller than the world, already prepared or already sharded.
        ConfigError: the configuration does not go with this loader.
    """
    # With ranks that stand in for others there is nobody to talk to.
    stands_in = world_size not in (None, runtime.world_size)
    shared = communicator if runtime.world_size > 1 and not stands_in else None
    axes = axes or ParallelDims(replicate=runtime.world_size if world_size is None else world_size)
    rank = axes.data_rank(runtime.rank) if rank is None else rank
    world_size = axes.data
    with raise_on_all_ranks(shared) if shared is not None else nullcontext():
        plan, dispatch = decide(loader, config, axes)
        kinds = check_rng_types(rng_types or ())
        if dispatch and stands_in:
            raise UsageError(
                f"dispatch_batches=True needs {world_size} running processes, but this is the only one. Pass "
                "dispatch_batches=False to see the part of one rank."
            )
    # The loader's samplers draw the order, as without Lockstep; else it is a function of seed and epoch. Ranks that
    # stand in for others cannot ask rank 0 what it draws.
    draws = not stands_in and (config.data_seed is None or config.use_seedable_sampler)
    batches, samples = lengths(loader)
    seed = seed_of(loader, config, draws)
    if shared is not None:
        seed = _seed_of_rank_0(shared, seed, (batches, samples), rank, dispatch, loader)
    sampler, seedable = order_sampler(loader), None
    if draws and config.use_seedable_sampler and not is_iterable(loader):
        sampler, seedable = with_seedable(sampler, seed)
    ranks = range(plan.world_size) if dispatch else (rank,)
    reader = make_reader(loader, sampler, plan, seed, ranks)
    non_blocking = config.non_blocking or loader.pin_memory
    moves_to = partial(batch_mover, non_blocking=non_blocking, pins=config.pin_memory, rank=runtime.rank)
    asks_rank_0 = draws and not dispatch and (is_iterable(loader) or not draws_nothing(sampler))
    receive = None
    if dispatch and shared is not None:
        receive = partial(
            dispatched,
            communicator=shared,
            rank=rank,
            device=runtime.device,
            move=moves_to(runtime.device),
        )
    return PreparedLoader(
        LoaderParts(
            original=loader,
            reader=reader,
            plan=plan,
            rank=rank,
            processes=runtime.world_size,
            seed=seed,
            step=step,
            device=device,
            mover=moves_to,
            batches=batches,
            samples=samples,
            opaque=batches_by_sampler(loader) is None,
            reads=runtime.is_main or not dispatch,
            dispatch=receive,
            rng_types=kinds,
            generators=generators_of(loader) if draws else None,
            stateful_samplers=stateful_samplers(loader),
            seedable=seedable,
            common_states=partial(states_of_rank_0, shared) if asks_rank_0 and shared is not None else None,
        )
    )


def _seed_of_rank_0(
    communicator: Communicator, seed: int, own: Lengths, rank: int, dispatch: bool, loader: DataLoader[object]
) -> int:
    """Return the seed of the common order; raises where a rank has other data than rank 0."""
    with raise_on_all_ranks(communicator):
        found = fingerprint_of(loader)
    common, main, *of_main = communicator.broadcast_object_list([seed, found, *own], from_process=0)
    with raise_on_all_ranks(communicator):
        check_lengths(own, tuple(of_main), rank, dispatch)
        check_same(found, main, communicator.runtime.rank)
    return int(common)


def prepare_data_loader(
    dataloader: DataLoader[object],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[object] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: object = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: None = None,
    *,
    step: StepState | None = None,
) -> PreparedLoader:
    """Return a loader of this rank's batches, with the arguments of Accelerate's function of this name.

    ``accelerator.prepare(loader)`` does the same with the settings of the run. With several ranks, call it on every
    rank.

    Args:
        dataloader: A torch ``DataLoader``.
        device: The device to which batches go with ``put_on_device``. None: this process's device.
        num_processes: The number of ranks. None: that of the run.
        process_index: The rank. None: that of this process.
        split_batches: As in ``DataLoaderConfiguration``.
        put_on_device: Whether batches are moved to ``device``.
        rng_types: Names of random number generators that get the states of rank 0 before each epoch.
        dispatch_batches: As in ``DataLoaderConfiguration``.
        even_batches: As in ``DataLoaderConfiguration``.
        slice_fn_for_dispatch: Refused: rank 0 collates the batch of each rank by itself.
        use_seedable_sampler: As in ``DataLoaderConfiguration``.
        data_seed: As in ``DataLoaderConfiguration``.
        non_blocking: As in ``DataLoaderConfiguration``.
        use_stateful_dataloader: As in ``DataLoaderConfiguration``.
        torch_device_mesh: Refused: ``Accelerator`` knows which ranks get the same batches.
        step: The ``StepState`` that learns which batch is the last. None: one of its own.

    Raises:
        ConfigError: a refused argument is given, or the settings do not go with this loader.
        UsageError: the loader is empty, has fewer samples than there are ranks, or is prepared already.

    Examples:
        ```python
        import torch
        from lockstep.data_loader import prepare_data_loader

        loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2)
        second = prepare_data_loader(loader, num_processes=2, process_index=1)
        assert [batch.tolist() for batch in second] == [[2, 3], [6, 7]]
        ```
    """
    if slice_fn_for_dispatch is not None:
        raise ConfigError(
            "slice_fn_for_dispatch has no effect here: rank 0 collates the batch of each rank separately. Leave "
            "it out."
        )
    if torch_device_mesh is not None:
        raise ConfigError(
            "torch_device_mesh is not used: parallel= of the Accelerator sets which ranks share a model. Leave "
            "it out, and prepare the loader with Accelerator(parallel='tp=2'), for instance."
        )
    runtime = start_runtime()
    config = DataLoaderConfiguration(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
    )
    return prepare_loader(
        dataloader,
        runtime=runtime,
        step=step or StepState(),
        config=config,
        communicator=Communicator(runtime),
        device=(device or runtime.device) if put_on_device else None,
        rank=process_index,
        world_size=num_processes,
        rng_types=rng_types,
    )


def states_of_rank_0(communicator: Communicator, states: States) -> States:
    common: States = communicator.broadcast_object_list([states], from_process=0)[0]
    return common


def seed_of(loader: DataLoader[object], config: DataLoaderConfiguration, draws: bool) -> int:
    if config.data_seed is not None:
        return config.data_seed
    # Accelerate's seedable sampler does not ask for the loader's generator.
    return torch.initial_seed() if draws and config.use_seedable_sampler else initial_seed_of(loader)


def order_sampler(loader: DataLoader[object]) -> Iterable[object]:
    """Return the sampler of batches of indices, or of indices where the dataset makes batches itself."""
    sampler = batches_by_sampler(loader)
    return loader.sampler if sampler is None else sampler


def make_reader(
    loader: DataLoader[object],
    sampler: Iterable[object],
    plan: ShardPlan,
    seed: int,
    ranks: Sequence[int],
) -> Reader:
    options = carried_options(loader)
    collate_fn = cast(Callable[[object], object], loader.collate_fn)
    if is_iterable(loader):
        stream = ShardedStream(
            cast(IterableDataset[object], loader.dataset),
            plan,
            ranks,
            loader.batch_size,
            loader.drop_last,
            collate_fn,
            loader.num_workers,
        )
        # The stream collates by itself, so that the counts of a round can travel with its batches.
        streaming = DataLoader(stream, batch_size=None, collate_fn=as_it_is, **options)
        return StreamReader(streaming, stream, loader.generator)
    order = GlobalOrder(sampler, seed, opaque=batches_by_sampler(loader) is None)
    batches = ShardedBatches(order, plan, ranks, loader.num_workers)
    if loader.batch_sampler is None:
        options.update(sampler=batches, batch_size=None)
    else:
        options.update(batch_sampler=batches)
    inner = DataLoader(loader.dataset, collate_fn=collate_fn, **options)
    return MapReader(inner, batches, loader.generator)
