"""Copies of a state that are made while training goes on, for which ``optimizer.step()`` waits.

When a save is called, each tensor is cloned lazily: the clone shares the tensor's memory until one of both is written
to. Then a thread copies the clones into host memory, while the next forward and backward run. ``optimizer.step()``
waits until all are copied: as a rule there is nothing left to wait for.

Whatever else writes to an original meanwhile, such as an edit by hand, a moving average or a gradient of an open
window, moves it into new memory, which torch sees to: the clone keeps the values that were saved.
"""

from __future__ import annotations

import threading

import torch

from lockstep.checkpoint.format.tensors import TensorFile
from lockstep.checkpoint.state import RankState
from lockstep.checkpoint.store.verify import in_parallel
from lockstep.comm.dtensor import is_dtensor, local
from lockstep.runtime.clock import StepClock
from lockstep.torch_internals.copy_on_write import lazy_clone, take_back
from lockstep.torch_internals.tensors import storage_key

SMALL_BYTES = 64 << 10
"""Of a tensor that is copied at once where its memory cannot be shared, or where a forward may change it."""


class DeferredCopies:
    """The tensors of one save in the background, from its call until they are copied.

    ``bytes_at_once`` were copied by the call itself. ``uncloned`` tells whether there are tensors left that must be
    copied before the call returns, as nothing can keep their values: those of devices, of mapped files and the like.
    """

    def __init__(self, clock: StepClock) -> None:
        self.bytes_at_once = 0
        self.uncloned = False
        self._clock = clock
        # By the clone's storage. The thread that trains lets go of them: until then the memory stays where it is.
        self._clones: dict[int, torch.Tensor] = {}
        self._originals: list[torch.Tensor] = []
        # Local parts of DTensors, by name.
        self._parts: dict[str, torch.Tensor] = {}
        # (host memory, view of a clone)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_over = threading.Event()

    # By the call of the save ---------------------------------------------------------------------------

    @torch.no_grad()
    def freeze(self, state: RankState) -> None:
        """Put clones in place of the state's tensors. Of a DTensor the part is cloned; see ``part_of``."""
        for tensors in (state.tensors, state.of_first, state.shared, state.of_rank):
            for name, tensor in tensors.items():
                # Buffers and the like, which a forward may change.
                clone = self._clone(local(tensor).detach(), tensors is not state.tensors)
                if clone is None:
                    self.uncloned = True
                elif is_dtensor(tensor):
                    self._parts[name] = clone
                else:
                    tensors[name] = clone

    def _clone(self, original: torch.Tensor, changes_soon: bool) -> torch.Tensor | None:
        is_small = original.nbytes <= SMALL_BYTES
        clone = None if is_small and changes_soon else lazy_clone(original)
        if clone is not None:
            self._clones[storage_key(clone)] = clone
            self._originals.append(original)
        elif is_small:
            self.bytes_at_once += original.nbytes
            return original.to("cpu", copy=True)
        return clone

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the local part of one of the state's tensors, as it was."""
        return self._parts[name] if is_dtensor(tensor) and name in self._parts else local(tensor)

    def defer(self, target: torch.Tensor, view: torch.Tensor) -> bool:
        """Copy ``view`` of a state's tensor into ``target`` later. Return False if it was not cloned."""
        # It is a view of the clone, so it has the clone's storage.
        is_cloned = storage_key(view) in self._clones
        if is_cloned:
            self._copies.append((target, view))
        return is_cloned

    def forget(self, state: RankState) -> None:
        """Clear the names of a state of which all copies are known, as they would keep the clones."""
        for tensors in (state.tensors, state.of_first, state.shared, state.of_rank, self._parts):
            tensors.clear()

    # By the thread that saves --------------------------------------------------------------------------

    @torch.no_grad()
    def copy(self) -> None:
        """Make the copies."""
        in_parallel(lambda pair: pair[0].copy_(pair[1]), self._copies)
        self.end()

    def end(self) -> None:
        """Let nobody wait any more: all is copied, or the save has failed."""
        self._copies.clear()
        self._is_over.set()

    # By the thread that trains -------------------------------------------------------------------------

    def before_step(self) -> None:
        """Wait until everything is copied, and let go of it."""
        if not self._is_over.is_set():
            part = self._clock.enter("save")
            self._is_over.wait()
            self._clock.enter(part)
        self.release()

    def release(self) -> None:
        """Let originals have their memory for themselves, as several threads of an offloaded step may write to it."""
        self._clones.clear()
        self._parts.clear()
        while self._originals:
            take_back(self._originals.pop())


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
        """Copy the tensors of these files, and return files of the copies. Those that ``copies`` makes come later."""
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
