"""The prepared loader: this rank's part of the global order, one batch ahead, on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from lockstep.comm.tree import send_to_device
from lockstep.data.order import announce_epoch
from lockstep.data.readers import MapReader, Reader, Rounds
from lockstep.data.shard import ShardPlan
from lockstep.errors import ConfigError, UsageError
from lockstep.runtime.seed import rng_state, set_rng_state
from lockstep.runtime.step import LoaderProgress, StepState


@dataclass
class Position:
    """Where iteration over a loader stands: ``batches`` of ``epoch`` have been handed out.

    ``start`` is how many of them the reader itself left out. ``inner`` is the state of torchdata's
    loader after them, where one is kept.
    """

    epoch: int = 0
    batches: int = 0
    start: int = 0
    inner: dict[str, Any] | None = None


@dataclass
class EpochCounter:
    """The epoch that the next iteration is; shared by a loader and its copies that skip batches."""

    next: int = 0


@dataclass(frozen=True)
class LoaderParts:
    """What ``prepare_loader`` decided, for a ``PreparedLoader``.

    ``original`` is the user's loader. ``batches`` and ``samples`` are those of the whole order (None:
    unknown). ``opaque``: the dataset makes whole batches itself. ``keeps_inner_state``: the dataset saves
    its own position, through torchdata. ``reads``: this rank reads. ``dispatch`` turns the rounds read on
    rank 0 into this rank's. ``before_epoch`` runs first in each epoch.
    """

    original: DataLoader[Any]
    reader: Reader
    plan: ShardPlan
    rank: int
    seed: int
    step: StepState
    device: torch.device | None
    non_blocking: bool
    batches: int | None
    samples: int | None
    opaque: bool
    keeps_inner_state: bool
    reads: bool
    dispatch: Callable[[Rounds | None], Rounds] | None
    before_epoch: Callable[[], None]


class PreparedLoader(DataLoader[Any]):
    """A data loader that yields this rank's batches and tells the step which of them is the last.

    Every iteration is one epoch. Attributes that are not described here are those of ``inner``, the torch
    loader that reads, and then of the user's own loader, ``original``.
    """

    def __init__(self, parts: LoaderParts) -> None:
        # DataLoader.__init__ is left out on purpose: the loader that reads is parts.reader.inner.
        self._parts = parts
        self._epochs = EpochCounter()
        self._skip = 0
        self._position: Position | None = None
        self._resume: Position | None = None
        self._progress = LoaderProgress()

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
        """The torch loader that reads."""
        return self._parts.reader.inner

    @property
    def dataset(self) -> Any:  # type: ignore[override]
        return self.original.dataset

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        return self.original.sampler

    @property
    def collate_fn(self) -> Any:  # type: ignore[override]
        return self.original.collate_fn

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        return self._parts.plan.drop_last

    @property  # type: ignore[misc]
    def multiprocessing_context(self) -> Any:
        return self.original.multiprocessing_context

    @property
    def device(self) -> torch.device | None:
        return self._parts.device

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """Rows of a full batch on this rank (None: they vary)."""
        return None if self._parts.opaque else self._parts.plan.rank_batch_size

    @property
    def total_batch_size(self) -> int | None:
        """Rows of a full batch over all ranks (None: they vary)."""
        return None if self._parts.opaque else self._parts.plan.total_batch_size

    @property
    def even_batches(self) -> bool:
        """Whether the last round is completed so that all ranks have equally many batches.

        Set it before an iteration, on every rank alike.

        Raises:
            UsageError: iterable data, or batches that rank 0 dispatches.
        """
        return self._parts.plan.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        if even == self.even_batches:
            return
        reader = self._parts.reader
        if not isinstance(reader, MapReader) or self._parts.dispatch is not None:
            raise UsageError(
                f"even_batches={even} was set on a prepared loader of {type(self.dataset).__name__}, but only loaders "
                "that read map-style data on every rank can be changed after prepare. Set it in "
                "DataLoaderConfiguration instead."
            )
        self._parts = replace(self._parts, plan=replace(self._parts.plan, even_batches=even))
        reader.batches.plan = self._parts.plan

    @property
    def total_dataset_length(self) -> int:
        return len(self.dataset)

    @property
    def remainder(self) -> int:
        """Samples in the last, incomplete global batch; 0 if there is none, -1 if it is not known."""
        total = self.total_batch_size
        if self.drop_last or not total or self._parts.samples is None:
            return -1
        return self._parts.samples % total

    @property
    def end_of_dataloader(self) -> bool:
        """The last batch of the running iteration has been handed out."""
        return self._progress.end_of_data

    def __len__(self) -> int:
        """Number of batches on this rank. Raises TypeError where the data has no length."""
        if self._parts.batches is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length, so its loader has none.")
        batches = self._parts.plan.length(self._parts.batches, self._parts.rank, self._parts.samples)
        return batches - self._skip

    # -- epochs and position ------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration will be."""
        return self._epochs.next

    # Accelerate's name for it.
    iteration = epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch ``epoch``."""
        self._epochs.next = epoch

    def skipping(self, num_batches: int) -> PreparedLoader:
        """This loader without its first ``num_batches`` batches, in every iteration.

        Of map-style data the left out batches are never read. Epochs are counted together with this one.
        """
        length = len(self) if self._parts.batches is not None else None
        check_skip(num_batches, length)
        other = copy.copy(self)
        other._skip += num_batches
        other._progress = LoaderProgress()
        other._position = other._resume = None
        return other

    def state_dict(self) -> dict[str, Any]:
        """The exact position: epoch and number of batches handed out in it, and the seed of the order."""
        position = self._position or self._resume or Position(self._epochs.next, self._skip, self._skip)
        return {
            "epoch": position.epoch,
            "batches": position.batches,
            "start": position.start,
            "inner": position.inner,
            "seed": self._parts.seed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next iteration continue behind the batches that ``state_dict`` counts."""
        position = Position(**{name: state_dict[name] for name in ("epoch", "batches", "start", "inner")})
        if not self._parts.keeps_inner_state:
            position.inner = None
        self._parts = replace(self._parts, seed=state_dict.get("seed", self._parts.seed))
        reader = self._parts.reader
        if isinstance(reader, MapReader):
            reader.batches.order = replace(reader.batches.order, seed=self._parts.seed)
        self._position = None
        self._resume = position
        self._epochs.next = position.epoch

    # -- iteration ----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        progress = LoaderProgress(loader=self)
        self._progress = progress
        self._parts.step.begin(progress)
        try:
            yield from self._batches(progress)
        finally:
            self._parts.step.finish(progress)
            # No reference cycle: workers of a loader that is collected late take seconds to end.
            progress.loader = None

    def _batches(self, progress: LoaderProgress) -> Iterator[Any]:
        epoch = self._epochs.next
        resume, self._resume = self._resume, None
        self._epochs.next = epoch + 1
        # A loaded position is stale once another epoch was chosen.
        continues = resume is not None and resume.epoch == epoch
        begin = resume if resume is not None and continues else Position(epoch, self._skip, self._skip)
        # Without a state of its own to continue from, the reader leaves out what was handed out.
        start = begin.start if begin.inner is not None else begin.batches
        source = self._source(begin, start)
        handed_out = begin.batches
        device, non_blocking = self._parts.device, self._parts.non_blocking
        generators = rng_state() if continues and handed_out else None
        current = next(source, None)
        if generators is not None:
            # This batch had been read when the position was saved: reading it again must draw nothing.
            set_rng_state(generators)
        while current is not None:
            [batch], counts = current
            if device is not None:
                # Enqueued before the next batch is read, so that copy and reading overlap.
                batch = place(batch, device, non_blocking)
            inner_state = self._inner_state()
            current = next(source, None)
            progress.end_of_data = current is None
            progress.counts = counts
            handed_out += 1
            self._position = Position(epoch, handed_out, start, inner_state)
            if current is None:
                self._position = Position(epoch + 1, self._skip, self._skip)
            yield batch
        self._position = None

    def _source(self, begin: Position, start: int) -> Rounds:
        parts = self._parts
        parts.before_epoch()
        if not parts.reads:
            assert parts.dispatch is not None
            return parts.dispatch(None)
        announce_epoch(parts.original, parts.seed, begin.epoch)
        if begin.inner is not None:
            self.inner.load_state_dict(begin.inner)  # type: ignore[attr-defined]
        source = parts.reader.read(begin.epoch, start, begin.batches - start)
        return parts.dispatch(source) if parts.dispatch is not None else source

    def _inner_state(self) -> dict[str, Any] | None:
        if not (self._parts.keeps_inner_state and self._parts.reads):
            return None
        state: dict[str, Any] = self.inner.state_dict()  # type: ignore[attr-defined]
        return state


def place(batch: Any, device: torch.device, non_blocking: bool) -> Any:
    """``batch`` on ``device``. A list of tensors, what ``default_collate`` mostly makes, needs no walk over a tree."""
    if type(batch) is list and all(type(part) is torch.Tensor for part in batch):
        return [part.to(device, non_blocking=non_blocking) for part in batch]
    return send_to_device(batch, device, non_blocking=non_blocking)


def check_skip(num_batches: int, length: int | None) -> None:
    """Raise UsageError unless ``num_batches`` of a loader with ``length`` batches can be skipped."""
    if isinstance(num_batches, bool) or not isinstance(num_batches, int) or num_batches < 0:
        raise ConfigError(f"num_batches is {num_batches!r}, but only 0 or more batches can be skipped.")
    if length is not None and num_batches > length:
        raise UsageError(
            f"{num_batches} batches cannot be skipped: the loader has {length}. "
            "Count batches within the epoch, on one process."
        )
