"""The threads of a step: one reads ahead, one computes, one writes back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from lockstep.errors import OffloadError
from lockstep.offload.copies import Event
from lockstep.offload.files.direct import aligned_buffer
from lockstep.offload.optimizer.device import Fetched
from lockstep.offload.optimizer.kernel import KernelEntry, OptimizerSettings
from lockstep.offload.optimizer.states import StepRegion, arrange, read_all, write_all

_BUFFERS = 3


@dataclass(eq=False)
class StepItem:
    """Parameters that are stepped together.

    ``regions`` of theirs that lie in files, by parameter and role; their gradients on the way from a device, and the
    event of new values having come there.
    """

    name: str
    entries: list[KernelEntry]
    regions: dict[tuple[int, str], StepRegion] = field(default_factory=dict)
    fetched: list[Fetched | None] = field(default_factory=list)
    published: Event = None
    done: threading.Event = field(default_factory=threading.Event)
    succeeded: bool = False

    def end(self, succeeded: bool) -> None:
        """Let go of gradients and whoever waits."""
        self.succeeded = self.succeeded or succeeded
        self.entries, self.regions, self.fetched = [], {}, []
        self.done.set()


class StepRun:
    """The items of one step, in order. ``error``: the first one; the items after it are left as they were."""

    def __init__(self, items: list[StepItem], settings: OptimizerSettings) -> None:
        self.items = items
        self.settings = settings
        self.error: BaseException | None = None
        self.failed: StepItem | None = None
        self._lock = threading.Lock()

    def fail(self, item: StepItem, error: BaseException) -> None:
        with self._lock:
            if self.error is None:
                self.error, self.failed = error, item

    def describe_error(self) -> OffloadError:
        """What went wrong, for the thread that computes."""
        stepped = sum(item.succeeded for item in self.items)
        where = self.failed.name if self.failed is not None else "the worker"
        return OffloadError(
            f"The optimizer's step is half done: {stepped} of {len(self.items)} parts of the model were stepped, "
            f"then {where} failed: {self.error} Load model and optimizer from the last checkpoint, or start the "
            "run again."
        )


class _Buffer:
    """A buffer that grows when asked for more."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, nbytes: int) -> torch.Tensor:
        if self._bytes.numel() < nbytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._bytes = aligned_buffer(nbytes)
        return self._bytes[:nbytes]


@dataclass
class _Staged:
    """An item's regions in a buffer; no buffer where it has none."""

    data: torch.Tensor
    buffer: _Buffer | None = None


class StepThreads:
    """Runs steps in the background, item by item.

    While an item is computed, the next one is read and the one before is written: three buffers, each as large as
    what the largest item has in files. They are kept for the next step.

    Args:
        stage: The regions of an item that are to be read for it, set as ``StepItem.regions``.
        compute: Steps an item, whose regions are in the given buffer.
    """

    def __init__(
        self, stage: Callable[[StepItem], None], compute: Callable[[StepRun, StepItem, torch.Tensor], None]
    ) -> None:
        self._stage = stage
        self._compute = compute
        # Their threads are joined when the interpreter ends: a step that was begun is made.
        self._steps = ThreadPoolExecutor(1, "lockstep-step")
        self._reads = ThreadPoolExecutor(1, "lockstep-step-read")
        self._writes = ThreadPoolExecutor(1, "lockstep-step-write")
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        for _ in range(_BUFFERS):
            self._free.put(_Buffer())

    def start(self, run: StepRun) -> None:
        """Begin to step the items; returns at once."""
        self._steps.submit(self._go, run)

    def close(self) -> None:
        for pool in (self._steps, self._reads, self._writes):
            pool.shutdown()

    def _go(self, run: StepRun) -> None:
        writes: list[Future[None]] = []
        coming: list[Future[_Staged]] = []
        item = run.items[0]
        try:
            coming.append(self._read_ahead(item))
            for index, item in enumerate(run.items):
                staged = coming.pop().result()
                try:
                    if index + 1 < len(run.items):
                        coming.append(self._read_ahead(run.items[index + 1]))
                    if run.error is not None:  # of what was written meanwhile
                        raise run.error
                    self._compute(run, item, staged.data)
                except BaseException:
                    self._give_back(staged)
                    raise
                if staged.buffer is None:
                    item.end(succeeded=True)
                else:
                    writes.append(self._writes.submit(self._write_back, run, item, staged))
        except BaseException as error:
            run.fail(item, error)
        finally:
            self._wind_up(run, coming, writes)

    def _wind_up(self, run: StepRun, coming: list[Future[_Staged]], writes: list[Future[None]]) -> None:
        """Whatever happened: nothing is under way any more, all buffers are free, and nobody waits."""
        for read in coming:
            if read.exception() is None:
                self._give_back(read.result())
        for write in writes:
            write.exception()
        for item in run.items:
            item.end(succeeded=False)

    def _read_ahead(self, item: StepItem) -> Future[_Staged]:
        self._stage(item)
        if item.regions:
            return self._reads.submit(self._read, item)
        nothing: Future[_Staged] = Future()
        nothing.set_result(_Staged(torch.empty(0, dtype=torch.uint8)))
        return nothing

    def _read(self, item: StepItem) -> _Staged:
        buffer = self._free.get()
        try:
            regions = list(item.regions.values())
            data = buffer.of(arrange(regions))
            read_all(regions, data)
        except BaseException:
            self._free.put(buffer)
            raise
        return _Staged(data, buffer)

    def _write_back(self, run: StepRun, item: StepItem, staged: _Staged) -> None:
        try:
            regions = list(item.regions.values())
            arrange(regions)
            write_all([region for region in regions if region.changes], staged.data)
            item.end(succeeded=True)
        except BaseException as error:
            run.fail(item, error)
        finally:
            self._give_back(staged)

    def _give_back(self, staged: _Staged) -> None:
        if staged.buffer is not None:
            self._free.put(staged.buffer)
