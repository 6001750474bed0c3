"""Weights at rest in host memory, and on the device while they are used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.errors import OffloadError, UsageError
from lockstep.offload.copies import Copies, Event, Staging, copies_of, view_of
from lockstep.offload.weights.device.autograd import (
    AtEnd,
    Forwards,
    HostGradients,
    SavedCast,
    SavedView,
    own_mode,
    saved_tensors_hooks_of,
)
from lockstep.offload.weights.device.working import (
    Slot,
    Slots,
    WorkingTensor,
    WorkingWeights,
    lay_out,
    write_back,
)
from lockstep.offload.weights.groups import WeightGroup
from lockstep.torch_internals import autograd as torch_autograd
from lockstep.torch_internals.optim import StepListeners


class DeviceMover:
    """Copies the weights of groups into slots on a device, and their gradients back (a ``Mover``).

    At rest a module has its own parameters and buffers (the host tensors), and so have optimizers and ``state_dict``.
    While a group is in use its modules have working ones, whose memory is in a slot. What a forward writes to
    buffers or parameters gets to the host when it ends. Optimizer steps and in-place changes of host tensors are seen
    at the next use; ones through ``.data`` are not: call ``edited``.

    It is a listener of the groups' use, to be told before the streamer that calls ``load``, ``bind`` and
    ``release``. Without a streamer it loads by itself what backward asks for.

    Args:
        budget: Bytes of the device for slots; None: as many as are asked for.
        ready: Called before a group is loaded once more because its host tensors were changed.

    Raises:
        UsageError: a weight is no plain tensor in host memory.
    """

    def __init__(
        self,
        groups: Sequence[WeightGroup],
        device: torch.device,
        budget: int | None = None,
        ready: Callable[[WeightGroup], None] | None = None,
        copies: Callable[[torch.device], Copies] = copies_of,
    ) -> None:
        # A stream for either direction.
        self._to, self._back = copies(device), copies(device)
        self.slots = Slots(self._to, budget)
        self.request: Callable[[WeightGroup], None] = self._load_and_bind
        self._ready = ready
        self._staging = Staging(self._to)
        self._copies = {group: _GroupCopy(group, device) for group in groups}
        self._by_storage: dict[int, WeightGroup] = {}
        self._by_parameter = {
            id(working.tensor): (group, working)
            for group, copy in self._copies.items()
            for working in copy.working
            if working.is_parameter
        }
        self._by_host_tensor = {id(w.host_tensor): w for copy in self._copies.values() for w in copy.working}
        self._forward = Forwards()
        # To write back after backward.
        self._later: list[_GroupCopy] = []
        # The number of the graph task at whose end to write back.
        self._backward = -1
        self._closed = False
        largest = max((copy.nbytes for copy in self._copies.values()), default=0)
        self._gradients = HostGradients(self._back, 2 * largest, self._write_back_after_backward)
        self._watched: set[WorkingTensor] = set()
        _AFTER_STEPS.add(self)

    # -- as a mover --------------------------------------------------------------------------------------

    def nbytes(self, group: WeightGroup) -> int:
        return self._copies[group].nbytes

    def load(self, group: WeightGroup) -> None:
        copy = self._copies[group]
        with copy.lock, own_mode():
            if copy.slot is None or copy.is_stale:
                self._fill(copy)

    def bind(self, group: WeightGroup) -> None:
        copy = self._copies[group]
        with copy.lock, own_mode():
            if copy.slot is None or copy.is_stale:
                if self._ready is not None:
                    self._ready(group)
                self._fill(copy)
            assert copy.slot is not None
            self._to.follow()
            self._back.follow()
            # The device waits for the copy, not the host.
            self._to.compute_after(copy.copied)
            if not copy.is_used:
                for working in copy.working:
                    working.use(copy.slot.buffer)
                    working.record_version()
                copy.is_used = True
                self._by_storage[copy.slot.storage] = group
            self._follow_requires_grad(copy)
            copy.places.put_working()
            copy.is_in_place = True
            # Bound outside of a forward, as by backward: nobody says when it ends.
            if not copy.depth and not copy.write_back_later:
                copy.write_back_later = True
                self._later.append(copy)
                self._write_back_after_backward()

    def release(self, group: WeightGroup) -> bool:
        copy = self._copies[group]
        with copy.lock, own_mode():
            if copy.slot is None:
                return True
            if copy.depth or copy.slot.is_held(len(copy.working) if copy.is_used else 0):
                return False
            copy.write_back_later = False
            self._restore_host_tensors(copy)
            self._empty(copy)
            return True

    def close(self) -> None:
        self._closed = True
        self.flush()
        _AFTER_STEPS.remove(self)
        for copy in self._copies.values():
            with copy.lock, own_mode():
                self._restore_host_tensors(copy)
                if copy.slot is not None:
                    self._empty(copy)
        self.slots.clear()

    # -- as a listener -----------------------------------------------------------------------------------

    def forward_begins(self, group: WeightGroup) -> None:
        self._flush_what_failed()
        hooks = saved_tensors_hooks_of(self) if torch.is_grad_enabled() else None
        if hooks is not None:
            hooks.__enter__()
        self._forward.stack.append((group, hooks, torch.is_autocast_cache_enabled()))
        # It would keep a copy of every weight until autocast ends.
        torch.set_autocast_cache_enabled(False)
        copy = self._copies[group]
        with copy.lock:
            copy.depth += 1

    def forward_ended(self, group: WeightGroup) -> None:
        if not self._forward.stack or self._forward.stack[-1][0] is not group:
            # It failed before it had begun.
            return
        _, hooks, caches = self._forward.stack.pop()
        torch.set_autocast_cache_enabled(caches)
        if hooks is not None:
            hooks.__exit__(None, None, None)
        copy = self._copies[group]
        with copy.lock, own_mode():
            copy.depth -= 1
            if not copy.depth and not copy.write_back_later:
                self._restore_host_tensors(copy)

    def backward_begins(self, group: WeightGroup) -> None:
        self._write_back_after_backward()

    # -- of its own --------------------------------------------------------------------------------------

    def edited(self, host_tensors: Iterable[torch.Tensor]) -> None:
        """Load ``host_tensors``, which have been written to, again before they are used."""
        for host_tensor in host_tensors:
            working = self._by_host_tensor.get(id(host_tensor))
            if working is not None and working.host_tensor is host_tensor:
                working.edits += 1

    def flush(self) -> None:
        """Have everything on the host: gradients, what was written, and modules with their own parameters."""
        self._backward = -1
        later, self._later = self._later, []
        with own_mode():
            for copy in later:
                with copy.lock:
                    copy.write_back_later = False
                    if not copy.depth:
                        self._restore_host_tensors(copy)
            self._gradients.deliver_all()

    # -- for what autograd saved -------------------------------------------------------------------------

    def group_of_storage(self, storage: int) -> WeightGroup | None:
        return self._by_storage.get(storage)

    def group_of_parameter(self, tensor: torch.Tensor) -> tuple[WeightGroup, WorkingTensor] | None:
        found = self._by_parameter.get(id(tensor))
        return found if found is not None and found[1].tensor is tensor else None

    def working_at(self, group: WeightGroup, offset: int) -> WorkingTensor:
        """Return what has the byte at ``offset`` of the group's memory."""
        return next(w for w in reversed(self._copies[group].working) if w.offset <= offset)

    def view(self, saved: SavedView) -> torch.Tensor:
        """Return it in the memory that the group has now, for which it is loaded if it has none."""
        return self._when_used(
            saved.group,
            lambda buffer: saved.marked(view_of(buffer, saved.dtype, saved.size, saved.stride, saved.offset)),
        )

    def cast(self, saved: SavedCast) -> torch.Tensor:
        return self._when_used(
            saved.group,
            lambda buffer: (
                saved.working.part_of(buffer)
                .to(saved.dtype)
                .as_strided(saved.size, saved.stride, saved.offset)
            ),
        )

    def _when_used(self, group: WeightGroup, take: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return what ``take`` makes of the group's slot, for which the group is loaded if it is not."""
        copy = self._copies[group]
        # As it is, and once more when it was requested.
        for _ in range(2):
            with copy.lock, own_mode():
                if copy.slot is not None and copy.is_used:
                    return take(copy.slot.buffer)
            if not self._closed:
                self.request(group)
        why = "their streaming has ended" if self._closed else "they do not fit into the budget"
        raise OffloadError(
            f"Backward needs the weights of '{group.name}', but {why}. Run backward before stop_streaming(model), "
            "or raise the budget."
        )

    # -- steps -------------------------------------------------------------------------------------------

    def _fill(self, copy: _GroupCopy) -> None:
        slot = copy.slot
        if slot is None:
            slot = self.slots.take(copy.nbytes)
            # What was given to compute with the slot's memory comes before it is written.
            self._to.after(slot.free)
        else:
            self._to.after(self._to.computed())
        # Before the tensors are read: what is written meanwhile makes the copy stale.
        copy.record_host_states()
        try:
            for working in copy.working:
                self._staging.copy(working.part_of(slot.buffer), working.host_tensor.detach())
        except BaseException:
            if copy.slot is None:
                self.slots.give_back(slot, self._to.copied())
            raise
        copy.slot, copy.copied = slot, self._to.copied()

    def _empty(self, copy: _GroupCopy) -> None:
        assert copy.slot is not None
        if copy.is_used:
            del self._by_storage[copy.slot.storage]
            for working in copy.working:
                working.use_nothing()
        last_use = self._to.computed() if copy.is_used else copy.copied
        self.slots.give_back(copy.slot, last_use)
        copy.slot, copy.is_used = None, False

    def _restore_host_tensors(self, copy: _GroupCopy) -> None:
        """Give the modules their own tensors, with what was written to the working ones."""
        if not copy.is_in_place:
            return
        copy.is_in_place = False
        replaced = list(copy.places.replaced())
        copy.places.put_host_tensors()
        trained = copy.places.trained()
        written = [
            (working, working.tensor)
            for working in copy.working
            # In training, too: the kernels of batch normalization write without a trace.
            if working.is_written or (not working.is_parameter and working in trained)
        ]
        for working in copy.working:
            working.record_version()
        for working, tensor in replaced:
            if tensor is None or working.is_parameter:
                raise UsageError(
                    f"A forward has replaced '{working.name}', which is streamed. Write to it in place."
                )
            written.append((working, tensor))
            working.edits += 1
        write_back(self._back, written)

    def _follow_requires_grad(self, copy: _GroupCopy) -> None:
        for working in copy.working:
            if not working.is_parameter:
                continue
            if working.tensor.requires_grad != working.host_tensor.requires_grad:
                working.tensor.requires_grad_(working.host_tensor.requires_grad)
            if working.tensor.requires_grad and working not in self._watched:
                self._watched.add(working)
                self._gradients.watch(working)

    def _flush_what_failed(self) -> None:
        """Flush what is left of a backward that raised, or of a use outside of both passes."""
        if (self._later or self._backward != -1) and not torch_autograd.is_in_backward():
            self.flush()

    def _write_back_after_backward(self) -> None:
        task = torch_autograd.current_backward()
        if task not in (-1, self._backward):
            self._backward = task
            torch_autograd.at_end_of_backward(AtEnd(self.flush))

    def _load_and_bind(self, group: WeightGroup) -> None:
        self.load(group)
        self.bind(group)


class _GroupCopy:
    """A group on the device."""

    def __init__(self, group: WeightGroup, device: torch.device) -> None:
        self.lock = threading.RLock()
        self.working, self.nbytes = lay_out(group, device)
        self.places = WorkingWeights(group, {id(working.host_tensor): working for working in self.working})
        self.slot: Slot | None = None
        # The copy that filled the slot.
        self.copied: Event = None
        # The working tensors lie in the slot.
        self.is_used = False
        # The modules have the working tensors.
        self.is_in_place = False
        self.write_back_later = False
        # Forwards that it is in.
        self.depth = 0
        self._host_states: list[tuple[int, ...]] = []

    def record_host_states(self) -> None:
        self._host_states = [working.host_state() for working in self.working]

    @property
    def is_stale(self) -> bool:
        return self._host_states != [working.host_state() for working in self.working]


def _stepped(mover: DeviceMover, optimizer: torch.optim.Optimizer) -> None:
    """Note a step, or its begin (see offload/optimizer/attach.py): fused steps write without a trace."""
    for group in optimizer.param_groups:
        mover.edited(group["params"])


_AFTER_STEPS = StepListeners(register_optimizer_step_post_hook, _stepped)
