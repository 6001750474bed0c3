"""Gradients on their way from a device to the parameters in host memory."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lockstep.errors import UsageError
from lockstep.offload.copies import Copies, Event, HostPool, dense_strides, view_of
from lockstep.offload.weights.device.working import Working
from lockstep.torch_internals import tensors as torch_tensors


@dataclass(frozen=True)
class _Moving:
    working: Working
    gradient: torch.Tensor  # on the device; kept until it is copied
    buffer: torch.Tensor
    host: torch.Tensor  # a view of the buffer
    copied: Event


class HostGradients:
    """Moves each gradient to host memory as it appears, and adds it to its host tensor's ``grad``.

    At most ``limit`` bytes wait on the device; beyond, backward waits for the copies. Hooks of the host tensor run as
    those of any parameter: on the gradient before it is added, and after it was.
    """

    def __init__(self, copies: Copies, limit: int, arrives: Callable[[], None]) -> None:
        self._copies = copies
        self._limit = limit
        self._arrives = arrives
        self._pool = HostPool(copies)
        self._moving: deque[_Moving] = deque()
        self._bytes = 0

    def watch(self, working: Working) -> None:
        """Take the gradients of ``working`` from now on."""
        taker, taken = weakref.ref(self), weakref.ref(working)  # torch hides the cycle from the collector

        def take(tensor: torch.Tensor) -> None:
            if (gradients := taker()) is not None and (its_working := taken()) is not None:
                gradients._take(its_working)

        working.tensor.register_post_accumulate_grad_hook(take)

    def deliver_all(self) -> None:
        """Wait until every gradient is on the host."""
        while self._moving:
            self._deliver_first()

    @torch.no_grad()
    def _take(self, working: Working) -> None:
        gradient, working.tensor.grad = working.tensor.grad, None
        if gradient is None:
            return
        if gradient.requires_grad:
            raise UsageError(
                f"backward(create_graph=True) has reached '{working.name}', whose weights are streamed: their "
                "gradients are moved to host memory without a graph. Train it without offload of parameters."
            )
        self._arrives()
        for hook in torch_tensors.gradient_hooks_of(working.host_tensor):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if gradient.layout is not torch.strided:
            self.deliver_all()
            _add(working.host_tensor, gradient.to(working.host_tensor.device))
            return
        self._move(working, gradient)
        while self._moving and (
            self._bytes > self._limit or self._copies.is_done(self._moving[0].copied)
        ):  # fmt: skip
            self._deliver_first()

    def _move(self, working: Working, gradient: torch.Tensor) -> None:
        buffer = self._pool.take(gradient.nbytes)
        host = view_of(buffer, gradient.dtype, gradient.shape, dense_strides(gradient))
        self._copies.follow()
        self._copies.after(self._copies.computed())
        self._copies.copy(host, gradient)
        self._moving.append(_Moving(working, gradient, buffer, host, self._copies.copied()))
        self._bytes += gradient.nbytes

    @torch.no_grad()
    def _deliver_first(self) -> None:
        moving = self._moving.popleft()
        self._bytes -= moving.gradient.nbytes
        self._copies.wait(moving.copied)
        if _add(moving.working.host_tensor, moving.host):
            self._pool.give_back(moving.buffer)


def _add(host_tensor: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether ``gradient`` was added to one that was there; otherwise it is the one now."""
    is_added = host_tensor.grad is not None
    if is_added:
        host_tensor.grad.add_(gradient)  # type: ignore[union-attr]
    else:
        host_tensor.grad = gradient
    for hook in torch_tensors.post_accumulate_hooks_of(host_tensor):
        hook(host_tensor)
    return is_added
