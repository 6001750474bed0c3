"""The prepared loader: this rank's part of the global order, on the device, with an exact position."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

from torch.utils.data import DataLoader

from lockstep.comm.tree import StateDict
from lockstep.config.enums import RNGType
from lockstep.data.drawn import Drawing, generators_of, of_samplers, pass_epochs, states_of_samplers
from lockstep.data.loader_parts import LoaderParts
from lockstep.data.map_reader import MapReader
from lockstep.data.order import announce_epoch
from lockstep.data.position import (
    Epochs,
    Iteration,
    LoaderSetup,
    Position,
    SavedDraws,
    batches_behind,
    read_state,
    size_of,
    state_of,
)
from lockstep.data.readers import GlobalBatches, ReadRound, ReadStart
from lockstep.data.rng import PrivateDraws
from lockstep.data.skip import check_skip
from lockstep.errors import UsageError
from lockstep.runtime.seed import synchronize_rng_states
from lockstep.runtime.step import LoaderProgress, Resumption, StepState


class PreparedLoader(DataLoader[Any]):
    """A data loader that yields this rank's batches and tells the step which of them is the last.

    ``prepare`` makes it. Every iteration is one epoch. Attributes that are not described here are those of ``inner``,
    the torch loader that reads the data, and then those of ``original``, the user's own loader. ``around``, if given,
    is a function that gets each iteration and returns the one that the script sees.

    Four attributes may be set, for the next iteration and those after it. ``device`` is where batches go, and with None
    they stay on the CPU. Generators of ``rng_types`` get the states of rank 0 before each epoch. Each iteration leaves
    out the first ``skip_batches`` batches of this rank. ``iteration`` is the number of the next epoch, as ``epoch``.

    Args:
        parts: What ``prepare`` has put together for it.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator

        accelerator = Accelerator()
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(16), batch_size=2))
        loader.set_epoch(3)
        first = next(iter(loader))
        state = loader.state_dict()  # behind the batch that was handed out
        loader.check_state_dict(state)
        loader.load_state_dict(state)
        assert len(list(loader)) == len(loader) - 1
        assert len(list(loader.skipping(2))) == len(loader) - 2  # in every epoch
        ```
    """

    def __init__(self, parts: LoaderParts) -> None:
        # DataLoader.__init__ is left out on purpose: the loader that reads is parts.reader.inner.
        self._parts = parts
        self._epochs = Epochs(parts.seed, seeded=parts.generators is None)
        self.device, self.rng_types, self.skip_batches = parts.device, parts.rng_types, 0
        self._whole: PreparedLoader | None = None
        self._progress = LoaderProgress()
        self._running: tuple[GlobalBatches, LoaderProgress, Iteration] | None = None
        self.around: Callable[[PreparedLoader, Iterator[Any]], Iterator[Any]] | None = None

    def __getstate__(self) -> StateDict:
        # A copy is in no loop.
        return {**self.__dict__, "_running": None}

    def __getattr__(self, name: str) -> Any:
        if name == "_parts" or name.startswith("__"):
            raise AttributeError(name)
        for holder in (self._parts.reader.inner, self._parts.original):
            if hasattr(holder, name):
                return getattr(holder, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    # -- what it is ---------------------------------------------------------------------------------

    @property
    def original(self) -> DataLoader[Any]:
        """The loader that was given to ``prepare``."""
        return self._parts.original

    @property
    def inner(self) -> DataLoader[Any]:
        """The torch loader that reads the data."""
        return self._parts.reader.inner

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """The same as ``inner``."""
        return self.inner

    @base_dataloader.setter
    def base_dataloader(self, loader: DataLoader[Any]) -> None:
        if loader is not self.inner:
            raise UsageError(
                "base_dataloader of a prepared loader was set, but its place in the global order belongs to the loader "
                "that it has. Pass the other loader to prepare."
            )

    # Scripts ask for it: no state of torchdata is kept.
    use_stateful_dataloader: bool = False

    # What ``inner`` has in a form of ours.
    dataset = property(attrgetter("original.dataset"))
    sampler = property(attrgetter("original.sampler"))
    collate_fn = property(attrgetter("original.collate_fn"))
    generator = property(attrgetter("original.generator"))
    synchronized_generator = property(attrgetter("original.generator"))

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        """Whether an incomplete last batch is left out."""
        return self._parts.plan.drop_last

    @property  # type: ignore[misc]
    def multiprocessing_context(self) -> Any:
        """The multiprocessing context of the worker processes."""
        return self.original.multiprocessing_context

    @property
    def dispatches(self) -> bool:
        """Whether rank 0 reads the data for all ranks."""
        return self._parts.plan.dispatched

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """The number of rows of a full batch on this rank. None: it varies."""
        return None if self._parts.opaque else self._parts.plan.rank_batch_size

    @property
    def total_batch_size(self) -> int | None:
        """The number of rows of a full batch over all ranks. None: it varies."""
        return None if self._parts.opaque else self._parts.plan.total_batch_size

    @property
    def even_batches(self) -> bool:
        """Whether the last round is completed, so that all ranks have equally many batches.

        To change it, set it before an iteration, to the same value on every rank.

        Raises:
            UsageError: the data is iterable, or rank 0 reads it for all ranks.
        """
        return self._parts.plan.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        if even == self.even_batches:
            return
        reader = self._parts.reader
        if not isinstance(reader, MapReader) or self._parts.dispatch is not None:
            raise UsageError(
                f"even_batches={even} was set on a prepared loader of {type(self.dataset).__name__}, but after "
                "prepare() it can be changed only if every rank reads map-style data. Set it in "
                "DataLoaderConfiguration instead."
            )
        self._parts = replace(self._parts, plan=replace(self._parts.plan, even_batches=even))
        reader.batches.plan = self._parts.plan

    @property
    def total_dataset_length(self) -> int:
        """The number of samples of the dataset, for all ranks."""
        return len(self.dataset)

    @property
    def gradient_state(self) -> StepState:
        """The ``StepState`` to which this loader reports the ends of its epochs."""
        return self._parts.step

    @property
    def remainder(self) -> int:
        """The number of samples in an incomplete last global batch. 0: it is complete. -1: it is not known."""
        total = self.total_batch_size
        if self.drop_last or not total or self._parts.samples is None:
            return -1
        return self._parts.samples % total

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the script has received the last batch of the running iteration."""
        return self._progress.end_of_data

    def __len__(self) -> int:
        """Return the number of batches on this rank. Raises TypeError where the data has no length."""
        if self._parts.batches is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length, so its loader has no length.")
        batches = self._parts.plan.length(self._parts.batches, self._parts.rank, self._parts.samples)
        return batches - self.skip_batches

    # -- epochs and position ------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next iteration will be, from 0."""
        return self._epochs.next

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch ``epoch``. It calls ``set_epoch`` of datasets and samplers that have it."""
        self._epochs.choose(epoch)
        if self._parts.reads:
            announce_epoch(self.original, self._epochs.seed, epoch, seeded=False)

    # Accelerate's name for it.
    iteration = property(attrgetter("epoch"), set_epoch)

    def skipping(self, num_batches: int) -> PreparedLoader:
        """Return this loader without its first ``num_batches`` batches, in every iteration.

        The batches that are left out are not read if the data is map-style. Both loaders share epoch and position.
        """
        length = len(self) if self._parts.batches is not None else None
        check_skip(num_batches, length)
        other = copy.copy(self)
        other.skip_batches += num_batches
        other._progress = LoaderProgress()
        # Positions are saved from it.
        other._whole = self
        return other

    def leave_out(self, batches: int) -> tuple[int, int | None]:
        """Leave out the next batches of the running iteration. Call it in the loop, on every rank.

        Args:
            batches: The number of batches. The iteration ends if it has fewer. They are read.

        Returns:
            The number of batches that were left out, and the number of samples of all ranks in them (None: it is not
            known).

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(16), batch_size=2))
            seen = 0
            for batch in loader:
                seen += 1
                if seen == 1:
                    loader.leave_out(2)  # on every rank
            assert seen == len(loader) - 2
            ```
        """
        samples: int | None = 0
        for number in range(batches):
            read = None if self._running is None else next(self._running[0], None)
            if read is None or self._running is None:
                return number, samples
            [_, this], [_, progress, iteration] = read, self._running
            _reach(this, progress, iteration)
            samples = None if samples is None or this.counts is None else samples + this.counts.total
        return batches, samples

    def state_dict(self) -> StateDict:
        """Return the exact position in the global order as plain values.

        In a loop, and after a ``break``, the position is after the last batch that the loop received. After the last
        batch, and before the first loop, it is the beginning of the next epoch.

        Raises:
            UsageError: an epoch of map-style data is not complete, and its workers use ``in_order=False``.
        """
        reader = self._parts.reader
        if isinstance(reader, MapReader) and self._running is not None and self._running[2].behind is None:
            reader.exhaust()
        setup = self._setup()
        position = self._epochs.position(setup.streams)
        if position.is_midway and not reader.has_position:
            raise UsageError(
                "in_order=False gives the batches of several workers in changing order, so this loader has no "
                "exact position inside an epoch. Use in_order=True, or save between epochs."
            )
        return state_of(position, self._epochs.seed, setup, self._draws(position))

    def _draws(self, position: Position) -> SavedDraws | None:
        """Return what the samplers of this loader draw; None: the order is a function of seed and epoch."""
        parts = self._parts
        drawing = position.drawing if position.is_midway else None
        generators = parts.generators if drawing is None else drawing.generators
        if generators is None or (drawing is None and self._epochs.seeded):
            return None
        return SavedDraws(
            seedable=parts.seedable is not None,
            now=generators.read(),
            start=None if drawing is None else drawing.start,
            first=None if drawing is None else drawing.first,
            digest=position.digest,
            shown=None if drawing is None else drawing.shown,
            workers=parts.reader.workers.existed if position.is_midway else parts.reader.workers.exist,
            samplers=states_of_samplers(parts.stateful_samplers) if drawing is None else drawing.samplers,
        )

    def check_state_dict(self, state_dict: dict[str, object]) -> None:
        """Check that ``load_state_dict`` would take ``state_dict``. Nothing is changed.

        Raises:
            CheckpointError: it is not the state of a loader, or that of other data.
        """
        read_state(state_dict, self._setup())

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Let the next iteration continue at the position in ``state_dict``. The number of ranks may have changed.

        If it has not changed, pass each rank's own state. Otherwise pass that of rank 0 on every rank.

        Raises:
            CheckpointError: this is not the state of a loader, or that of other data. Nothing was changed.
        """
        parts, epochs = self._parts, self._epochs
        position, seed, draws = read_state(state_dict, self._setup())
        if draws is not None:
            generators = parts.generators or generators_of(self.original)
            draws.check_fits(
                parts.seedable is not None,
                len(generators.own),
                len(parts.stateful_samplers),
                position.is_midway,
                parts.reads,
            )
            is_new = epochs.latest is None and not epochs.next
            if position.epoch and is_new and isinstance(parts.reader, MapReader):
                pass_epochs(self.original, position.epoch)
            for sampler, state in zip(parts.stateful_samplers, draws.samplers, strict=True):
                sampler.load_state_dict(copy.deepcopy(state))
            if position.is_midway and draws.start is not None:
                drawing = Drawing(generators, draws.start, draws.first, None, True, draws.digest, draws.shown)
                drawing.samplers = draws.samplers
                if self.inner.num_workers or state_dict["num_workers"]:
                    drawing.saved = draws.now
                if not position.same_world or state_dict["num_workers"] != self.inner.num_workers:
                    drawing.retraced = of_samplers(self.original, generators)
                position = replace(position, drawing=drawing, digest=draws.digest)
            # A checkpoint restores the global ones, but not in another world, where those of rank 0 give the order.
            decides = parts.rank == 0 and not position.same_world and parts.generators is not None
            generators.write(draws.now if decides else generators.read()[:3] + draws.now[3:])
        parts.reader.workers.loaded = draws is not None and position.same_world and draws.workers
        # With a data_seed only the epoch that was begun goes on in the order that was drawn for it.
        if draws is None or parts.generators is not None:
            epochs.seed, epochs.seeded = seed, draws is None
        epochs.next, epochs.latest = position.epoch, None
        epochs.loaded = position if position.is_midway else None

    def _setup(self) -> LoaderSetup:
        parts, plan = self._parts, self._parts.plan
        return LoaderSetup(
            kind="map" if isinstance(parts.reader, MapReader) else "stream",
            world_size=plan.world_size,
            batch_size=None if parts.opaque else plan.batch_size,
            split_batches=plan.split_batches,
            even_batches=plan.even_batches,
            drop_last=plan.drop_last,
            num_workers=self.inner.num_workers,
            # Data that another rank reads may have any length here.
            dataset_size=size_of(self.dataset) if parts.reads else None,
            processes=parts.processes,
        )

    # -- iteration ----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # Not a generator itself: torch's loader draws when the iteration begins, and again with the first batch.
        begin, iteration = self._epochs.begin(self._setup().streams)
        behind = 0
        if begin.is_midway:
            behind = batches_behind(begin.behind, self.total_batch_size)
            self._epochs.resumption = Resumption(behind, self._parts.rank)
        batches = self._iterate(self._source(begin, iteration), iteration, behind)
        return batches if self.around is None else self.around(self, batches)

    def _iterate(self, source: GlobalBatches, iteration: Iteration, behind: int) -> Iterator[object]:
        step, clock = self._parts.step, self._parts.step.clock
        move = None if self.device is None else self._parts.mover(self.device)
        # On a CPU nothing is copied.
        is_copied = self.device is not None and self.device.type != "cpu"
        clock.batch_wanted()
        progress = self._progress = LoaderProgress(loader=self, batches=behind)
        progress.resumption = resumption = self._epochs.resumption
        step.begin(progress)
        self._running = source, progress, iteration
        number = 0
        try:
            for [batch], this in source:
                if progress.end_of_data:
                    self._check_length(f"more than {number}")
                number += 1
                _reach(this, progress, iteration)
                if is_copied:
                    clock.enter("to_device")
                if move is not None:
                    batch = move(batch)
                clock.batch_comes(batch)
                if resumption is not None:
                    resumption.taken += 1
                yield batch
                # Behind the last one, the script has more to do before the step is complete.
                if not this.last:
                    clock.batch_wanted()
            clock.enter("other")
            iteration.behind = None
            if resumption is not None and resumption.left_over is None:
                resumption.left_over = resumption.taken
            if number and not progress.end_of_data:
                self._check_length(f"only {number}")
        finally:
            iteration.running = False
            self._running = None
            step.finish(progress)
            # No reference cycle: workers of a loader that is collected late take seconds to end.
            progress.loader = None

    def _check_length(self, given: str) -> None:
        """Raise UsageError where it does harm that the sampler's length did not tell which batch is the last one."""
        step = self._parts.step
        if step.accumulation_steps > 1 and step.sync_with_dataloader:
            raise UsageError(
                f"The loader gave {given} batches in this iteration, but len() of its "
                f"{type(self.original.batch_sampler or self.sampler).__name__} gives another number, so the "
                "gradients of the last batches were not used as they should be. Give the sampler an exact "
                "__len__, or none."
            )

    def _source(self, begin: Position, iteration: Iteration) -> GlobalBatches:
        parts = self._parts
        # What an uninterrupted run did at the beginning of the epoch is in the generators that were loaded.
        if not (begin.is_midway and begin.same_world):
            # The generator needs nothing: the order is common already.
            synchronize_rng_states([kind for kind in self.rng_types if kind != RNGType.GENERATOR])
        if not parts.reads:
            assert parts.dispatch is not None
            return parts.dispatch(None)
        seed = self._epochs.seed
        drawing = iteration.drawing = self._drawing(begin)
        announce_epoch(parts.original, seed, begin.epoch, drawing is None)
        if parts.seedable is not None:
            parts.seedable.seed, parts.seedable.epoch = seed, begin.epoch
        # A position counts in the whole epoch, also for a copy that skips its beginning.
        left_out = 0 if begin.is_midway else self.skip_batches
        source = parts.reader.read(ReadStart(seed, begin.epoch, begin.behind, left_out, drawing))
        return parts.dispatch(source) if parts.dispatch is not None else source

    def _drawing(self, begin: Position) -> Drawing | None:
        parts, drawing = self._parts, begin.drawing
        if drawing is None:
            if self._epochs.seeded or parts.generators is None:
                return None
            drawing = Drawing(parts.generators, parts.generators.read())
            drawing.samplers = states_of_samplers(parts.stateful_samplers)
            if parts.common_states is not None:
                drawing.start = parts.common_states(drawing.start)
        if parts.common_states is not None or parts.dispatch is not None:
            drawing.private = PrivateDraws(drawing.generators, drawing.start)
        return drawing


def _reach(this: ReadRound, progress: LoaderProgress, iteration: Iteration) -> None:
    """Move the iteration behind this round."""
    progress.batches += 1
    progress.counts, progress.end_of_data, iteration.behind, iteration.digest, states = this
    if iteration.drawing is not None:
        iteration.drawing.shown = states
