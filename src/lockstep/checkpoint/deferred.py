"""Copies of a state that are made while training goes on, and what waits for them.

When a save is called, each tensor is cloned lazily: the clone shares the tensor's memory until one of both is written
to. Then a thread copies the clones into host memory, in the order in which the originals will change, while the next
forward and backward run. ``optimizer.step()`` waits for what this optimizer changes, and ``backward`` for gradients of
an open accumulation window: as a rule there is nothing left to wait for.

Whatever else writes to an original meanwhile, such as an edit by hand or a moving average, moves it into new memory,
which torch sees to: the clone keeps the values that were saved. No version and no order has to be right for that.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from lockstep.checkpoint.contents import CheckpointContents
from lockstep.checkpoint.format.codec import Document
from lockstep.checkpoint.format.tensors import TensorFile
from lockstep.checkpoint.state import RankState
from lockstep.checkpoint.store.verify import in_parallel
from lockstep.comm.dtensor import is_dtensor, local
from lockstep.runtime.clock import StepClock
from lockstep.torch_internals.copy_on_write import is_shared, lazy_clone, take_back
from lockstep.torch_internals.tensors import storage_key

SMALL_BYTES = 64 << 10
"""Of a tensor that is copied at once where its memory cannot be shared, or where a forward may change it."""

BACKWARD, NOBODY = -1, 1 << 30
"""In place of an optimizer's number: what changes gradients, and what no part of a step changes."""


@dataclass(eq=False)
class FrozenTensor:
    """A tensor as it was when the save was called.

    ``original`` is the run's, ``clone`` has the values; ``copies`` are (host memory, view of the clone) to make.
    ``changed_by`` are the optimizers, by number, that will change the original.
    """

    original: torch.Tensor
    clone: torch.Tensor | None
    changed_by: tuple[int, ...]
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class DeferredCopies:
    """The tensors of one save in the background, from its call until they are copied.

    ``bytes_at_once`` were copied by the call itself. ``uncloned`` tells whether there are tensors left that must be
    copied before the call returns, as nothing can keep their values: those of devices, of mapped files and the like.
    """

    def __init__(self, contents: CheckpointContents, clock: StepClock) -> None:
        self.bytes_at_once = 0
        self.uncloned = False
        self._clock = clock
        self._numbers = {
            id(getattr(optimizer, "optimizer", optimizer)): number
            for number, (_, optimizer) in enumerate(contents.stateful("optimizer"))
        }
        self._changed = threading.Condition()
        # By the storage of the clone.
        self._frozen: dict[int, FrozenTensor] = {}
        # Local parts of DTensors, by name.
        self._parts: dict[str, torch.Tensor] = {}
        self._pending: deque[FrozenTensor] = deque()
        self._left: Counter[int] = Counter()
        self._originals: dict[int, list[torch.Tensor]] = {}
        self._kept: list[torch.Tensor] = []

    # By the call of the save ---------------------------------------------------------------------------

    @torch.no_grad()
    def freeze(self, state: RankState) -> None:
        """Put clones in place of the state's tensors. Of a DTensor the part is cloned; see ``part_of``."""
        changed_by = _changed_by(state)
        for tensors in (state.tensors, state.of_first, state.shared, state.of_rank):
            for name, tensor in tensors.items():
                clone = self._clone(name, local(tensor).detach(), changed_by)
                if clone is None:
                    self.uncloned = True
                elif is_dtensor(tensor):
                    self._parts[name] = clone
                else:
                    tensors[name] = clone

    def _clone(
        self, name: str, original: torch.Tensor, changed_by: Mapping[str, tuple[int, ...]]
    ) -> torch.Tensor | None:
        # Parameters are known by their whole name, state of an optimizer by "optimizer.<i>".
        by = changed_by.get(name) or changed_by.get(".".join(name.split(".")[:2]), (NOBODY,))
        is_small = original.nbytes <= SMALL_BYTES
        clone = None if is_small and by == (NOBODY,) else lazy_clone(original)
        if clone is None:
            if is_small:
                self.bytes_at_once += original.nbytes
                return original.to("cpu", copy=True)
            return None
        self._frozen[storage_key(clone)] = FrozenTensor(original, clone, by)
        self._left.update(by)
        return clone

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The local part of one of the state's tensors, as it was."""
        return self._parts[name] if is_dtensor(tensor) and name in self._parts else local(tensor)

    # By the thread that saves --------------------------------------------------------------------------

    def defer(self, target: torch.Tensor, view: torch.Tensor) -> bool:
        """Copy ``view`` of a state's tensor into ``target`` later; False where it was not cloned."""
        # It is a view of the clone, so it has the clone's storage.
        frozen = self._frozen.get(storage_key(view))
        if frozen is not None:
            frozen.copies.append((target, view))
        return frozen is not None

    def begin(self, state: RankState) -> None:
        """All that is to be copied is known: the rest of the state can change from now on."""
        # Any other reference to a clone would keep it, and with it the shared memory, beyond ``_finish``.
        for tensors in (state.tensors, state.of_first, state.shared, state.of_rank):
            tensors.clear()
        self._parts.clear()
        everything, self._frozen = list(self._frozen.values()), {}
        # Clones of which another rank writes the tensor.
        unwanted = [frozen for frozen in everything if not frozen.copies]
        wanted = [frozen for frozen in everything if frozen.copies]
        # As originals change: gradients first, then optimizer by optimizer, last what no step changes.
        wanted.sort(key=lambda frozen: min(frozen.changed_by))
        # From here on they are copied by whoever comes first.
        with self._changed:
            self._pending.extend(wanted)
            self._changed.notify_all()
        for frozen in unwanted:
            self._finish(frozen)

    def copy(self) -> None:
        """Make the copies that are left; all are complete when this returns."""
        while True:
            while (frozen := self._next()) is not None:
                self._copy(frozen)
            # A copy that another thread has begun comes back here if its step is interrupted.
            with self._changed:
                self._changed.wait_for(lambda: self._pending or not self._left.total())
                if not self._pending:
                    return

    def close(self) -> None:
        """Nothing is copied any more, be it that all is or that the save has failed: nobody waits."""
        with self._changed:
            self._frozen.clear()
            self._parts.clear()
            self._pending.clear()
            self._left.clear()
            self._changed.notify_all()

    def _next(self, number: int | None = None) -> FrozenTensor | None:
        """The next to copy: for the thread any, for who waits one of what it changes."""
        with self._changed:
            for frozen in self._pending:
                if number is None or number in frozen.changed_by:
                    self._pending.remove(frozen)
                    return frozen
        return None

    @torch.no_grad()
    def _copy(self, frozen: FrozenTensor) -> None:
        try:
            for target, view in frozen.copies:
                target.copy_(view)
        except BaseException:
            # A step was interrupted: the thread makes this copy.
            with self._changed:
                self._pending.append(frozen)
                self._changed.notify_all()
            raise
        self._finish(frozen)

    def _finish(self, frozen: FrozenTensor) -> None:
        """Let go of a clone, so that its original has its memory for itself."""
        frozen.copies.clear()
        clone, frozen.clone = frozen.clone, None
        with self._changed:
            if clone is not None and not is_shared(frozen.original):
                # It was written to, so the clone alone holds the memory of before, from which another thread of the
                # run may still be reading.
                self._kept.append(clone)
            del clone
            for number in frozen.changed_by:
                self._left[number] -= 1
                if number != NOBODY:
                    self._originals.setdefault(number, []).append(frozen.original)
            self._changed.notify_all()

    # By the run ----------------------------------------------------------------------------------------

    def before_step(self, optimizer: object) -> None:
        """Wait until what this optimizer changes is copied; copies some of it meanwhile."""
        number = self._numbers.get(id(optimizer))
        if number is not None:
            self._wait(number)
        self._kept.clear()

    def before_backward(self) -> None:
        """Wait until gradients of an open accumulation window are copied."""
        self._wait(BACKWARD)

    def release(self) -> None:
        """After the save: forget what is kept of the run."""
        for number in list(self._originals):
            self._take_back(number)
        self._kept.clear()

    def _wait(self, number: int) -> None:
        if self._left[number] > 0:
            part = self._clock.enter("save")
            while self._left[number] > 0:
                frozen = self._next(number)
                if frozen is not None:
                    self._copy(frozen)
                else:
                    with self._changed:
                        self._changed.wait_for(lambda: self._left[number] <= 0 or self._has_pending(number))
            self._clock.enter(part)
        self._take_back(number)

    def _has_pending(self, number: int) -> bool:
        return any(number in frozen.changed_by for frozen in self._pending)

    def _take_back(self, number: int) -> None:
        """Before several threads may write, as an offloaded step's do."""
        for original in self._originals.pop(number, ()):
            take_back(original)


def _changed_by(state: RankState) -> dict[str, tuple[int, ...]]:
    """Which optimizers change a tensor, by its name; by the first two words of names where these belong together."""
    found: dict[str, tuple[int, ...]] = {}
    # rank.<r>.window.<path> is this rank's alone, window.<path> is laid out as the parameters are.
    rank_of_window = {name for name in state.of_rank if name.split(".")[2:3] == ["window"]}
    for name in (*rank_of_window, *(name for name in state.tensors if name.startswith("window."))):
        found[name] = (BACKWARD,)
    for number, document in _optimizers(state):
        found[f"optimizer.{number}"] = (number,)
        for parameter in _parameters(document, state):
            found[parameter] = (*found.get(parameter, ()), number)
    return found


def _optimizers(state: RankState) -> Iterator[tuple[int, Document]]:
    for name, document in state.common.items():
        kind, _, number = name.partition(".")
        if kind == "optimizer":
            yield int(number), document


def _parameters(document: Document, state: RankState) -> list[str]:
    """The names of an optimizer's parameters; where it does not name them, of all that it may have."""
    if not document["by_name"]:
        return [name for name in state.tensors if name.startswith("model.")]
    return [f"model.{name}" for group in document["value"]["param_groups"] for name in group["params"]]


class HostStager:
    """Memory for one copy of what this rank writes, kept from save to save.

    Fresh memory is an order of magnitude slower to fill than memory that was used before.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies.values())

    @torch.no_grad()
    def stage(
        self, files: dict[str, TensorFile], copies: DeferredCopies | None = None
    ) -> dict[str, TensorFile]:
        """The files with copies of their tensors, complete when this returns, but for those that ``copies`` makes."""
        before, self._copies = self._copies, {}
        devices, on_host = set(), []
        for file, content in files.items():
            for key, tensor in content.tensors.items():
                source = local(tensor.detach())
                copy = before.pop((file, key), None)
                if copy is None or copy.shape != source.shape or copy.dtype != source.dtype:
                    copy = _host_memory(source)
                self._copies[file, key] = copy
                if copies is not None and copies.defer(copy, source):
                    continue
                if source.device.type == "cpu":
                    on_host.append((copy, source))
                else:
                    copy.copy_(source, non_blocking=True)
                    devices.add(source.device)
        in_parallel(lambda pair: pair[0].copy_(pair[1]), on_host)
        for device in devices:
            torch.accelerator.synchronize(device)
        return {
            file: TensorFile({key: self._copies[file, key] for key in content.tensors})
            for file, content in files.items()
        }


def _host_memory(source: torch.Tensor) -> torch.Tensor:
    # A copy from a GPU is asynchronous only into pinned memory.
    pinned = source.device.type == "cuda"
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
