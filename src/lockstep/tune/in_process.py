"""``find_batch_size``: the same search inside of a training process, before its loop begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from lockstep.comm.collectives import Communicator, raise_on_all_ranks
from lockstep.comm.tree import send_to_device
from lockstep.config.values import bytes_of
from lockstep.errors import UsageError
from lockstep.runtime.memory import clear_device_cache, is_out_of_memory
from lockstep.torch_internals.optim import step_without_hooks
from lockstep.train.optimizer import PreparedOptimizer
from lockstep.tune.loaders import refuse_own_batches
from lockstep.tune.memory import limit_of_rank, peak_of_rank, reset_peak
from lockstep.tune.saved_state import SavedState
from lockstep.tune.search import MemoryModel, divisors, next_size
from lockstep.tune.trial import SizeTrial, SizeVerdict, ruled_out

if TYPE_CHECKING:
    from lockstep.accelerator import Accelerator

LossOfRows = Callable[[Any, Any], Tensor]
COMMAND = "Run `lockstep tune` on the script instead, which tries each size in new processes."


@dataclass(frozen=True)
class FoundBatch:
    """The result of ``find_batch_size``. It is equal on all ranks.

    Attributes:
        micro_batch: The largest number of rows of a micro-batch that fits on every rank.
        accumulation: The number of micro-batches in one step, with ``micro_batch``.
        quickest: The number of rows of a micro-batch with the most samples a second, for the same global batch.
        global_batch: The number of rows in one step over all ranks.
        trials: One ``SizeTrial`` for each size that was tried or ruled out, in ascending order.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, find_batch_size

        accelerator = Accelerator()
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=16)
        found = find_batch_size(accelerator, model, optimizer, loader, lambda model, x: model(x).square().mean())
        assert found.micro_batch * found.accumulation * accelerator.num_processes == found.global_batch
        ```
    """

    micro_batch: int
    accumulation: int
    quickest: int
    global_batch: int
    trials: tuple[SizeTrial, ...]


def find_batch_size(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[object],
    loss_of: LossOfRows,
    *,
    global_batch: int | None = None,
    memory_limit: int | str | None = None,
    steps: int = 3,
) -> FoundBatch:
    """Find the largest micro-batch that fits on every rank, without changing the global batch. Call it on every rank.

    For each size, it computes loss and gradients of the first rows of the data ``steps`` times, and one optimizer
    step. The ranks do not communicate meanwhile, so that no rank waits for one that runs out of memory. Afterwards,
    parameters, gradients, buffers, optimizer state and random number generators are bit for bit as before. The loader
    is not iterated.

    Args:
        accelerator: The ``Accelerator`` that has prepared ``model`` and ``optimizer``.
        model: The prepared model. Each rank has the whole model.
        optimizer: The prepared optimizer.
        loader: A torch ``DataLoader`` that is not prepared, over a map-style dataset whose items can be read at any
            time.
        loss_of: A function (model, batch) -> loss, 0-d. The model is not wrapped by DDP, and the batch is on its
            device. It may not call collectives.
        global_batch: The number of rows in one step over all ranks. None: that of ``loader`` with
            ``accelerator.gradient_accumulation_steps``.
        memory_limit: Bytes of each rank, or a text such as ``"8GiB"``. None: the free memory.
        steps: The number of times that each size is computed, for measuring its speed.

    Returns:
        The micro-batch, the accumulation that goes with it, and each size that was tried. It is equal on all ranks.

    Raises:
        UsageError: no size fits, or this model, optimizer or loader cannot be tried. All ranks raise it.

    Examples:
        ```python
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        from lockstep import Accelerator, find_batch_size

        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        data = TensorDataset(torch.randn(64, 4))
        found = find_batch_size(
            accelerator, model, optimizer, DataLoader(data, batch_size=16), lambda model, rows: model(*rows).mean()
        )
        accelerator.gradient_accumulation_steps = found.accumulation
        loader = accelerator.prepare(DataLoader(data, batch_size=found.micro_batch, shuffle=True))
        assert found.micro_batch * found.accumulation == 16
        ```
    """
    runtime = accelerator.runtime
    ranks = Communicator(runtime)
    with raise_on_all_ranks(ranks):
        _refuse(accelerator, model, optimizer, loader)
        share = _rows_of_rank(accelerator, loader, global_batch)
        asked = None if memory_limit is None else bytes_of(memory_limit, "memory_limit", at_least=1)
    sizes = divisors(share)
    assert loader.batch_size is not None
    own = loader.batch_size // (runtime.world_size if accelerator.split_batches else 1)
    start = max(size for size in sizes if size <= max(1, own))
    # A size has to fit on every rank: the one with the least memory decides.
    limit = min(ranks.gather_object([limit_of_rank(asked, runtime.device, runtime.local_world_size)]))
    plain: nn.Module = accelerator.unwrap_model(model)
    attempt = _SizeOnRank(plain, _raw(optimizer), loader, loss_of, runtime.device, steps)
    trials: dict[int, SizeTrial] = {}
    while (size := next_size(sizes, start, {n: one.fits for n, one in trials.items()})) is not None:
        trials[size] = _tried(size, share, limit, trials, attempt, ranks)
    return _choose(trials, share, runtime.world_size)


def _choose(trials: dict[int, SizeTrial], share: int, ranks: int) -> FoundBatch:
    fitting = [one for one in trials.values() if one.fits]
    if not fitting:
        smallest = trials[min(trials)]
        raise UsageError(
            f"No micro-batch fits, down to {smallest.micro_batch} ({smallest.why}). Shard the model "
            "(parallel='zero=3'), or give each rank more memory."
        )
    largest = max(fitting, key=lambda one: one.micro_batch)
    quickest = max(fitting, key=lambda one: one.samples_per_s or 0.0)
    ordered = tuple(one for _, one in sorted(trials.items()))
    return FoundBatch(largest.micro_batch, largest.accumulation, quickest.micro_batch, share * ranks, ordered)


def _tried(
    size: int, share: int, limit: int, trials: dict[int, SizeTrial], attempt: _SizeOnRank, ranks: Communicator
) -> SizeTrial:
    """What came of a size: the same on all ranks, because each knows what all of them have seen."""
    accumulation = share // size
    peaks = {known: one.peak for known, one in trials.items() if one.fits and one.peak}
    model = MemoryModel.of(peaks)
    # The line through the two largest sizes is trusted only beyond them.
    if model is not None and size > max(peaks) and model.peak(size) > limit:
        return replace(ruled_out(size, accumulation, model.peak(size)), why="it would be over the limit")
    seen: list[_SizeMeasured] = ranks.gather_object([attempt.seen(size)])
    broken = next(((rank, one) for rank, one in enumerate(seen) if one.failed), None)
    if broken is not None and not trials:
        rank, one = broken
        raise UsageError(f"With a micro-batch of {size} rows loss_of failed on rank {rank}: {one.failed}")
    # Batch normalisation, for one, takes no single row.
    if broken is not None:
        rank, one = broken
        return SizeTrial(size, accumulation, SizeVerdict.FAILED, why=f"rank {rank}: {one.failed}")
    trial = SizeTrial(size, accumulation, SizeVerdict.FITS, peak=max(one.peak for one in seen) or None)
    short = next(((rank, one.short) for rank, one in enumerate(seen) if one.short), None)
    if short is not None:
        return replace(
            trial, verdict=SizeVerdict.OUT_OF_MEMORY, why=f"rank {short[0]}: {short[1]}", peak=None
        )
    if trial.peak is not None and trial.peak > limit:
        return replace(trial, verdict=SizeVerdict.OVER_LIMIT, why=f"{trial.peak} of {limit} bytes")
    # The slowest rank sets the pace of a step: accumulation micro-batches, and one step of the optimizer.
    micro_s, step_s = max(one.micro_s for one in seen), max(one.step_s for one in seen)
    samples_per_s = len(seen) * share / (accumulation * micro_s + step_s)
    return replace(trial, samples_per_s=samples_per_s, steps=attempt.steps)


@dataclass(frozen=True)
class _SizeMeasured:
    """Of one size on one rank: seconds, bytes (0: not known), what it lacked memory for, another error."""

    micro_s: float = 0.0
    step_s: float = 0.0
    peak: int = 0
    short: str = ""
    failed: str = ""


class _SizeOnRank:
    """Computes a size on this rank alone, and leaves no trace."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: DataLoader[object],
        loss_of: LossOfRows,
        device: torch.device,
        steps: int,
    ) -> None:
        self._model, self._optimizer, self._loader = model, optimizer, loader
        self._loss_of, self._device, self.steps = loss_of, device, steps

    def seen(self, size: int) -> _SizeMeasured:
        saved = SavedState(self._model, self._optimizer)
        is_known = reset_peak(self._device)
        failure: Exception | None = None
        seen = _SizeMeasured()
        try:
            seen = self._computed(size)
        except Exception as error:
            # Its frames keep the tensors of the attempt.
            failure = error.with_traceback(None)
        peak = peak_of_rank(self._device) if is_known else 0
        saved.restore()
        clear_device_cache(garbage_collection=True)
        if failure is not None:
            first_line = (f"{type(failure).__name__}: {failure}".strip().splitlines() or [""])[0]
            return (
                _SizeMeasured(short=first_line)
                if is_out_of_memory(failure)
                else _SizeMeasured(failed=first_line)
            )
        if self._device.type != "cuda":
            # The copies are in host memory, and training has none.
            peak = max(0, peak - saved.nbytes)
        return replace(seen, peak=peak)

    def _computed(self, size: int) -> _SizeMeasured:
        data, collate = self._loader.dataset, self._loader.collate_fn
        count = len(data)  # type: ignore[arg-type]
        rows = [data[number % count] for number in range(size)]
        batch = send_to_device(collate(rows), self._device)
        parameters = [parameter for parameter in nn.Module.parameters(self._model) if parameter.requires_grad]
        seconds = []
        gradients: tuple[Tensor | None, ...] = ()
        for _ in range(self.steps):
            began = self._synchronized_time()
            # Not by backward(): DDP would reduce, and what is at parameter.grad would not be the script's any more.
            gradients = torch.autograd.grad(self._loss_of(self._model, batch), parameters, allow_unused=True)
            seconds.append(self._synchronized_time() - began)
        began = self._synchronized_time()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        step = step_without_hooks(type(self._optimizer))
        step(self._optimizer)
        # The least of the times: the first ones choose kernels and ask for memory.
        return _SizeMeasured(micro_s=min(seconds), step_s=self._synchronized_time() - began)

    def _synchronized_time(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


# What is refused ---------------------------------------------------------------------------------------------


def _raw(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer


def _refuse(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, loader: DataLoader[object]
) -> None:
    parallel = accelerator.parallel
    axes = accelerator.meshes.axes
    if parallel.shards or axes.splits_model or axes.ep > 1:
        raise UsageError(
            f"With parallel='{parallel}' ranks communicate inside forward and backward, so if one runs out of "
            f"memory, the others hang. {COMMAND}"
        )
    if not isinstance(optimizer, PreparedOptimizer):
        raise UsageError(
            f"find_batch_size got an optimizer that was not prepared ({type(optimizer).__name__}). Pass the "
            "optimizer that accelerator.prepare() returns, so that parameters are on the device on which they "
            "are trained."
        )
    spanning = [name for name, part in model.named_modules() if isinstance(part, nn.SyncBatchNorm)]
    if spanning:
        raise UsageError(
            f"The model's SyncBatchNorm `{spanning[0]}` communicates with other ranks inside forward, so if one "
            f"runs out of memory, the others hang. {COMMAND}"
        )
    if type(loader).__module__.partition(".")[0] == "lockstep":
        raise UsageError(
            "find_batch_size got a loader that was prepared, whose batch size is fixed. Pass the torch "
            "DataLoader, and afterwards prepare a loader with the size that was found."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            f"find_batch_size reads the first rows of the data, but {type(loader.dataset).__name__} is iterable, "
            f"so training would not get these rows. {COMMAND}"
        )
    refuse_own_batches(loader)


def _rows_of_rank(accelerator: Accelerator, loader: DataLoader[object], global_batch: int | None) -> int:
    ranks = accelerator.runtime.world_size
    asked = global_batch
    if asked is None:
        assert loader.batch_size is not None
        own = loader.batch_size * accelerator.gradient_accumulation_steps
        asked = own if accelerator.split_batches else own * ranks
    if asked < 1 or asked % ranks:
        raise UsageError(
            f"A global batch of {asked} rows does not divide by {ranks} ranks. Pass a multiple of {ranks} as "
            "global_batch."
        )
    return asked // ranks
