"""The threads of a step: one reads ahead, one computes, one writes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from lockstep.errors import OffloadError
from lockstep.offload.copies import Event
from lockstep.offload.files.direct import aligned_buffer
from lockstep.offload.files.pages import is_untouched
from lockstep.offload.optimizer.device import FetchedGradient
from lockstep.offload.optimizer.kernel import KernelEntry, OptimizerSettings
from lockstep.offload.optimizer.states import StepRegion, arrange, in_order, read_all, write_all
from lockstep.torch_internals import tensors as torch_tensors

BUFFERS = 3
"""So many items are in memory at once."""

RegionKey = tuple[int, str]


VALUE = "value"
"""The role of a region that holds a parameter."""


@dataclass(eq=False)
class StepItem:
    """Parameters that are stepped together.

    ``states`` and ``others`` (parameters, gradients): regions of theirs that are moved to a buffer, by parameter and
    role. ``in_place``: regions of parameters that are stepped where they are mapped. ``fetched``: gradients on the way
    from a device; ``published``: the event of new values having come there.

    ``shown`` is set when the forward finds the new values (``succeeded`` tells whether it does), ``done`` when files
    have everything, too.
    """

    name: str
    entries: list[KernelEntry]
    states: dict[RegionKey, StepRegion] = field(default_factory=dict)
    others: dict[RegionKey, StepRegion] = field(default_factory=dict)
    in_place: list[StepRegion] = field(default_factory=list)
    fetched: list[FetchedGradient | None] = field(default_factory=list)
    published: Event = None
    shown: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    succeeded: bool = False

    def __post_init__(self) -> None:
        self.parameters = [entry.parameter for entry in self.entries]
        self.nbytes_besides_states = 0
        self._lock = threading.Lock()
        self._is_begun = self._is_awaited = False

    def begin(self) -> bool:
        """Begin a step whose regions are about to be chosen. Returns whether the pages of its parameters are
        brought."""
        with self._lock:
            self._is_begun = True
            return self._is_awaited

    def leave_in_place(self) -> bool:
        """Have parameters stepped where they are mapped, since their pages are wanted there. False: it is too late."""
        with self._lock:
            self._is_awaited = self._is_awaited or not self._is_begun
            return self._is_awaited

    def show(self) -> None:
        """Say that new values are where the forward finds them."""
        self.succeeded = True
        self.shown.set()

    def end(self) -> None:
        """Let go of gradients and whoever waits."""
        self.entries, self.states, self.others, self.in_place, self.fetched = [], {}, {}, [], []
        self.shown.set()
        self.done.set()


class StepRun:
    """The items of one step, in order. ``error``: the first one; the items after it are left as they were."""

    def __init__(self, items: list[StepItem], settings: OptimizerSettings) -> None:
        self.items = items
        self.settings = settings
        self.error: BaseException | None = None
        self.failed: StepItem | None = None
        self.over = threading.Event()
        self._lock = threading.Lock()

    def fail(self, item: StepItem, error: BaseException) -> None:
        with self._lock:
            if self.error is None:
                self.error, self.failed = error, item

    def describe_error(self) -> OffloadError:
        """Return what went wrong, for the thread that computes."""
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

    @property
    def nbytes(self) -> int:
        return self._bytes.numel()

    def reserve(self, nbytes: int) -> torch.Tensor:
        if self.nbytes < nbytes:
            # The old one goes before the new one comes.
            self._bytes = torch.empty(0, dtype=torch.uint8)
            self._bytes = aligned_buffer(nbytes)
        return self._bytes[:nbytes]


@dataclass
class _Staged:
    """An item's regions in a buffer; no buffer where it has none."""

    data: torch.Tensor
    buffer: _Buffer | None = None


@dataclass(eq=False)
class EarlyRead:
    """State that is read before its step begins.

    ``item``: of the step before, which writes the ``regions``. ``buffer``: where they are, in the end.
    """

    item: StepItem
    regions: list[StepRegion]
    buffer: Future[_Buffer] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [torch_tensors.version(region.like) for region in self.regions]

    def is_unchanged(self) -> bool:
        """Return whether nobody wrote to the tensors, or looked at them: writes through ``data`` have no version."""
        unchanged = self._versions_now() == self._versions
        return unchanged and all(is_untouched(region.like) for region in self.regions)

    def is_of(self, item: StepItem) -> bool:
        """Return whether these are the regions of the state of ``item``, in the order of ``arrange``."""
        places = [(region.file, region.offset, region.nbytes) for region in self.regions]
        return places == [(r.file, r.offset, r.nbytes) for r in in_order(item.states.values())]


class StepThreads:
    """Runs steps in the background, item by item.

    While an item is computed, the next one is read and the one before is written: three buffers, each as large as
    what the largest item has in files. They are kept for the next step.

    Args:
        stage: Sets which regions of an item are moved.
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
        self._early: list[EarlyRead] = []
        for _ in range(BUFFERS):
            self._free.put(_Buffer())

    def start(self, run: StepRun) -> None:
        """Begin to step the items; returns at once."""
        early, self._early = self._early, []
        self._steps.submit(self._go, run, early)

    def read_early(self, reads: list[EarlyRead]) -> None:
        """Begin to read for the first items of the next step, if the step before is over and nothing was read yet.

        At most ``BUFFERS`` of them.
        """
        self._early = reads
        for early in reads:
            early.buffer = self._reads.submit(self._read_state, early)

    @property
    def early(self) -> Sequence[EarlyRead]:
        """What was read, or is being read, for the next step."""
        return self._early

    def forget_early(self) -> None:
        """Drop what was read early: the files have something else now."""
        early, self._early = self._early, []
        if early:
            self._steps.submit(self._forget, early)

    def close(self) -> None:
        self.forget_early()
        for pool in (self._steps, self._reads, self._writes):
            pool.shutdown()

    def _go(self, run: StepRun, early: list[EarlyRead]) -> None:
        writes: list[Future[None]] = []
        coming: list[Future[_Staged]] = []
        item = run.items[0]
        try:
            coming.append(self._read_ahead(item, early))
            for index, item in enumerate(run.items):
                staged = coming.pop().result()
                try:
                    if index + 1 < len(run.items):
                        coming.append(self._read_ahead(run.items[index + 1], early))
                    # An error of what was written meanwhile.
                    if run.error is not None:
                        raise run.error
                    self._compute(run, item, staged.data)
                except BaseException:
                    self._give_back(staged)
                    raise
                # Values at rest where they were computed can be used now, others once they are written.
                if not any(role == VALUE for _, role in item.others):
                    item.show()
                if staged.buffer is None and not item.in_place:
                    item.end()
                else:
                    writes.append(self._writes.submit(self._write_back, run, item, staged))
        except BaseException as error:
            run.fail(item, error)
        finally:
            self._wind_up(run, early, coming, writes)

    def _wind_up(
        self,
        run: StepRun,
        early: list[EarlyRead],
        coming: list[Future[_Staged]],
        writes: list[Future[None]],
    ) -> None:
        """Whatever happened: nothing is under way any more, all buffers are free, and nobody waits."""
        self._forget(early)
        for read in coming:
            if read.exception() is None:
                self._give_back(read.result())
        for write in writes:
            write.exception()
        for item in run.items:
            item.end()
        run.over.set()

    def _read_ahead(self, item: StepItem, early: list[EarlyRead]) -> Future[_Staged]:
        self._stage(item)
        item.nbytes_besides_states = sum(region.nbytes for region in item.others.values())
        # The items are not those of the step before, for which state was read.
        if early and not early[0].is_of(item):
            self._forget(early)
        if item.states or item.others:
            return self._reads.submit(self._read, item, early.pop(0) if early else None)
        nothing: Future[_Staged] = Future()
        nothing.set_result(_Staged(torch.empty(0, dtype=torch.uint8)))
        return nothing

    def _read_state(self, early: EarlyRead) -> _Buffer:
        # The step before still writes these regions.
        early.item.done.wait()
        buffer = self._free.get()
        try:
            nbytes = arrange(early.regions)
            read_all(early.regions, buffer.reserve(nbytes + early.item.nbytes_besides_states))
        except BaseException:
            self._free.put(buffer)
            raise
        return buffer

    def _forget(self, early: list[EarlyRead]) -> None:
        while early:
            read = early.pop().buffer
            if read.exception() is None:
                self._free.put(read.result())

    def _read(self, item: StepItem, early: EarlyRead | None) -> _Staged:
        states, others = in_order(item.states.values()), in_order(item.others.values())
        nbytes_of_states = arrange(states)
        nbytes = arrange(others, nbytes_of_states)
        buffer = None
        if early is not None and early.buffer.exception() is None:
            buffer = early.buffer.result()
        # A buffer that has to grow loses what was read into it, which is then read again.
        if buffer is not None and buffer.nbytes >= nbytes:
            # They are in the buffer.
            states = []
        try:
            buffer = buffer or self._free.get()
            data = buffer.reserve(nbytes)
            read_all(states, data)
            read_all(others, data)
        except BaseException:
            if buffer is not None:
                self._free.put(buffer)
            raise
        return _Staged(data, buffer)

    def _write_back(self, run: StepRun, item: StepItem, staged: _Staged) -> None:
        try:
            changed = [(role, region) for (_, role), region in item.others.items() if region.changes]
            # Values first: a forward waits for them, and for nothing else.
            write_all(in_order(region for role, region in changed if role == VALUE), staged.data)
            item.show()
            write_all(in_order(region for role, region in changed if role != VALUE), staged.data)
            write_all(in_order(item.states.values()), staged.data)
            for region in item.in_place:
                region.file.flush(region.offset, region.nbytes)
        except BaseException as error:
            run.fail(item, error)
            item.succeeded = False
        finally:
            self._give_back(staged)
            item.end()

    def _give_back(self, staged: _Staged) -> None:
        if staged.buffer is not None:
            self._free.put(staged.buffer)
