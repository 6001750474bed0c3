"""Activations in host memory between forward and backward.

Forward of a call: its inputs are copied out while it computes, and what computes next waits for the copies, so
that the device's memory is free from then on. Backward of a call: the inputs of the call before it start to come
back while it computes. The host never waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.autograd.graph import saved_tensors_hooks

from lockstep.offload.copies import Copies, Event, HostPool, copies_of, dense_strides, view_of


def beside_accelerator(device: torch.device) -> Copies | None:
    """Return copies to and from an accelerator; None for devices whose tensors stay where they are."""
    return None if device.type in ("cpu", "meta") else copies_of(device)


class HostActivations(saved_tensors_hooks):
    """Keeps what autograd saves within it in host memory. To be entered for each call (of a block), in order.

    Tensors that require no gradient, which calls often share (masks, positions), stay where they are, and so do
    sparse ones and subclasses of tensors.

    Args:
        copies: Those of a device; None where tensors stay.
    """

    def __init__(self, copies: Callable[[torch.device], Copies | None] = beside_accelerator) -> None:
        super().__init__(self._pack, _unpack)
        self._copies_of = copies
        self._devices: dict[torch.device, tuple[Copies, HostPool] | None] = {}
        # Entered and not left.
        self._calls: list[_OffloadedCall] = []
        self._last: Callable[[], _OffloadedCall | None] = _none

    def __enter__(self) -> None:
        super().__enter__()
        self._calls.append(_OffloadedCall(self._last))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        call = self._calls.pop()
        for offloaded in call.offloaded():
            offloaded.leave_device()
        if call.offloaded():
            # Weak, so that the order of calls keeps no activation alive.
            self._last = weakref.ref(call)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _OffloadedInput:
        if not tensor.requires_grad or tensor.layout is not torch.strided:
            return tensor
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return tensor
        found = self._pool_for(tensor.device)
        return tensor if found is None else _OffloadedInput(self._calls[-1], *found, tensor.detach())

    def _pool_for(self, device: torch.device) -> tuple[Copies, HostPool] | None:
        if device not in self._devices:
            copies = self._copies_of(device)
            self._devices[device] = None if copies is None else (copies, HostPool(copies))
        return self._devices[device]


def _unpack(packed: torch.Tensor | _OffloadedInput) -> torch.Tensor:
    return packed.use() if isinstance(packed, _OffloadedInput) else packed


def _none() -> None:
    return None


class _OffloadedCall:
    """What one call keeps; alive as long as any of that is."""

    def __init__(self, previous: Callable[[], _OffloadedCall | None]) -> None:
        self.previous = previous
        self._offloaded: list[weakref.ref[_OffloadedInput]] = []

    def add(self, offloaded: _OffloadedInput) -> None:
        self._offloaded.append(weakref.ref(offloaded))

    def offloaded(self) -> list[_OffloadedInput]:
        return [one for reference in self._offloaded if (one := reference()) is not None]


class _OffloadedInput:
    """A tensor in host memory: being copied there, there, or being brought back."""

    def __init__(self, call: _OffloadedCall, copies: Copies, pool: HostPool, tensor: torch.Tensor) -> None:
        self._call = call
        self._copies = copies
        self._pool = pool
        self._layout = tensor.dtype, tuple(tensor.shape), dense_strides(tensor)
        self._nbytes = tensor.numel() * tensor.element_size()
        self._uses = 0
        self._host = pool.take(self._nbytes)
        copies.follow()
        # The copy starts when what computes this tensor is done.
        copies.after(copies.computed())
        copies.copy(self._on_host(), tensor)
        self._copied: Event = copies.copied()
        # Kept until it is copied.
        self._on_device: torch.Tensor | None = tensor
        call.add(self)

    def leave_device(self) -> None:
        """Free its memory on the device for what computes next, once it is copied."""
        if self._on_device is not None:
            # Its memory goes to what computes next, which must not write there before it is copied.
            self._copies.compute_after(self._copied)
            self._on_device = None

    def use(self) -> torch.Tensor:
        """Return the tensor, for the stream that is current. Others that will be used next start to come
        back.
        """
        self._copies.follow()
        self._uses += 1
        self._come_back()
        before = self._call.previous()
        for other in (*self._call.offloaded(), *(before.offloaded() if before is not None else ())):
            # It has not come back in this backward yet.
            if other._uses < self._uses:
                other._come_back()
        self._copies.compute_after(self._copied)
        tensor, self._on_device = self._on_device, None
        assert tensor is not None
        return tensor

    def _come_back(self) -> None:
        if self._on_device is not None:
            return
        buffer = self._copies.device_bytes(self._nbytes)
        tensor = view_of(buffer, *self._layout)
        # After what used this memory before.
        self._copies.after(self._copies.computed())
        self._copies.copy(tensor, self._on_host())
        self._copied = self._copies.copied()
        self._on_device = tensor

    def _on_host(self) -> torch.Tensor:
        return view_of(self._host, *self._layout)

    def __del__(self) -> None:
        # Without this attribute __init__ has failed, and nothing was copied.
        if hasattr(self, "_on_device"):
            self.leave_device()
            self._pool.give_back(self._host)
