"""Streamed weights and autograd: of what it saves of a weight only where that is, and gradients moved to host memory.

Also what else begins and ends with forward and backward passes.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from lockstep.errors import UsageError
from lockstep.offload.copies import Copies, Event, HostPool, dense_strides, view_of
from lockstep.offload.weights.device.working import WorkingTensor
from lockstep.offload.weights.groups import WeightGroup
from lockstep.torch_internals import autograd as torch_autograd
from lockstep.torch_internals import tensors as torch_tensors


@dataclass(frozen=True)
class SavedView:
    """A view of a group's memory, wherever this is."""

    group: WeightGroup
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    # In bytes.
    offset: int
    conjugated: bool
    negated: bool

    @staticmethod
    def of(group: WeightGroup, tensor: torch.Tensor) -> SavedView:
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return SavedView(
            group,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            offset,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def marked(self, view: torch.Tensor) -> torch.Tensor:
        """Mark a tensor with the bits of lazy conjugation and negation."""
        view = view.conj() if self.conjugated else view
        return torch_tensors.negated_lazily(view) if self.negated else view


@dataclass(frozen=True)
class SavedCast:
    """A view of what autocast made of a weight."""

    group: WeightGroup
    working: WorkingTensor
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    # In elements.
    offset: int


class SavedWeights(Protocol):
    """Where the weights of groups are."""

    def group_of_storage(self, storage: int) -> WeightGroup | None: ...

    def group_of_parameter(self, tensor: torch.Tensor) -> tuple[WeightGroup, WorkingTensor] | None: ...

    def working_at(self, group: WeightGroup, offset: int) -> WorkingTensor:
        """Return what has the byte at ``offset`` of the group's memory."""

    def view(self, saved: SavedView) -> torch.Tensor:
        """Return it in the memory that the group has now; it is loaded if it has none."""

    def cast(self, saved: SavedCast) -> torch.Tensor: ...


def saved_tensors_hooks_of(weights: SavedWeights) -> saved_tensors_hooks:
    """Replace what autograd saves of ``weights``. Other tensors are left to the hooks around these, if any."""
    outer: Any = torch_autograd.saved_tensors_hooks_now()

    def pack(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        saved = _recipe(weights, tensor)
        if saved is not None:
            at = saved if isinstance(saved, SavedCast) else None
            # Backward compares versions when it unpacks, as torch does for what it saves itself.
            working = at.working if at is not None else weights.working_at(saved.group, saved.offset)
            return partial(_weight, weights, saved, working, working.version)
        if outer is not None:
            return partial(outer[1], outer[0](tensor))
        # Itself it would keep its own graph alive.
        return partial(_kept, tensor.detach(), torch_tensors.version(tensor))

    return saved_tensors_hooks(pack, lambda packed: packed())


def _weight(
    weights: SavedWeights, saved: SavedView | SavedCast, working: WorkingTensor, version: tuple[int, int]
) -> torch.Tensor:
    if working.version != version:
        raise _modified(saved.size)
    return weights.cast(saved) if isinstance(saved, SavedCast) else weights.view(saved)


def _kept(tensor: torch.Tensor, version: int) -> torch.Tensor:
    # torch leaves this check to hooks.
    if torch_tensors.version(tensor) != version:
        raise _modified(tuple(tensor.shape))
    return tensor


def _recipe(weights: SavedWeights, tensor: torch.Tensor) -> SavedView | SavedCast | None:
    if tensor.layout is not torch.strided or not torch_tensors.has_storage(tensor):
        return None
    group = weights.group_of_storage(torch_tensors.storage_key(tensor))
    if group is not None:
        return SavedView.of(group, tensor)
    base = torch_tensors.base_of(tensor)
    leaf = _cast_parameter(base)
    found = None if leaf is None else weights.group_of_parameter(leaf)
    if found is None or tensor.dtype != base.dtype or not _lies_like(base, found[1]):
        return None
    size, stride = tuple(tensor.shape), tensor.stride()
    return SavedCast(*found, tensor.dtype, size, stride, int(tensor.storage_offset()))


def _cast_parameter(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter that ``tensor`` was cast from, and not been written to since."""
    cast = tensor.grad_fn
    if cast is None or type(cast).__name__ != "ToCopyBackward0" or torch_tensors.version(tensor):
        return None
    return getattr(cast.next_functions[0][0], "variable", None)


def _lies_like(tensor: torch.Tensor, working: WorkingTensor) -> bool:
    """Return whether a cast of ``working`` has the elements where ``tensor`` has them."""
    return (
        tensor.device == working.tensor.device
        and tensor.shape == working.tensor.shape
        and tensor.stride() == working.stride
        and not tensor.storage_offset()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _modified(size: tuple[int, ...]) -> RuntimeError:
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
        f"of shape {list(size)}, after the forward that used it. Change it after backward."
    )


class Forwards(threading.local):
    """Forwards that have begun in this thread, with what is to be restored at their end."""

    def __init__(self) -> None:
        self.stack: list[tuple[WeightGroup, saved_tensors_hooks | None, bool]] = []


class AtEnd:
    """A callback of a backward that is also called when this fails: the engine then only forgets it."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def __call__(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    __del__ = __call__


class own_mode:
    """Neither graphs nor inference tensors: what is made here outlives the mode of the caller."""

    def __enter__(self) -> None:
        self._inference = torch.inference_mode(False)
        self._inference.__enter__()
        self._grad = torch.no_grad()
        self._grad.__enter__()

    def __exit__(self, *error: object) -> None:
        self._grad.__exit__(*error)
        self._inference.__exit__(*error)


@dataclass(frozen=True)
class _Moving:
    working: WorkingTensor
    # On the device; kept until it is copied.
    gradient: torch.Tensor
    buffer: torch.Tensor
    # A view of the buffer.
    host: torch.Tensor
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

    def watch(self, working: WorkingTensor) -> None:
        """Take the gradients of ``working`` from now on."""
        # Weak, as the garbage collector cannot see a cycle through torch's hooks.
        taker, taken = weakref.ref(self), weakref.ref(working)

        def take(tensor: torch.Tensor) -> None:
            if (gradients := taker()) is not None and (its_working := taken()) is not None:
                gradients._take(its_working)

        working.tensor.register_post_accumulate_grad_hook(take)

    def deliver_all(self) -> None:
        """Wait until every gradient is on the host."""
        while self._moving:
            self._deliver_first()

    @torch.no_grad()
    def _take(self, working: WorkingTensor) -> None:
        gradient, working.tensor.grad = working.tensor.grad, None
        if gradient is None:
            return
        if gradient.requires_grad:
            raise UsageError(
                f"backward(create_graph=True) has reached '{working.name}', whose weights are streamed: their "
                "gradients are moved to host memory without a graph. Train this model without offload of "
                "parameters."
            )
        self._arrives()
        for hook in torch_tensors.hooks_of_parameter(working.host_tensor, torch_tensors.TENSOR):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if gradient.layout is not torch.strided:
            # It is added at once, and so must those be that came before it.
            self.deliver_all()
            _add(working.host_tensor, gradient.to(working.host_tensor.device))
            return
        self._move(working, gradient)
        while self._moving and (
            self._bytes > self._limit or self._copies.is_done(self._moving[0].copied)
        ):  # fmt: skip
            self._deliver_first()

    def _move(self, working: WorkingTensor, gradient: torch.Tensor) -> None:
        buffer = self._pool.take(gradient.nbytes)
        host = view_of(buffer, gradient.dtype, gradient.shape, dense_strides(gradient))
        # In backward this is a thread of autograd's own.
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
        # One that has become the host tensor's gradient keeps its buffer.
        if _add(moving.working.host_tensor, moving.host):
            self._pool.give_back(moving.buffer)


def _add(host_tensor: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Return whether ``gradient`` was added to one that was there; otherwise it is the one now."""
    is_added = host_tensor.grad is not None
    if is_added:
        host_tensor.grad.add_(gradient)  # type: ignore[union-attr]
    else:
        host_tensor.grad = gradient
    for hook in torch_tensors.hooks_of_parameter(host_tensor, torch_tensors.POST_ACCUMULATE):
        hook(host_tensor)
    return is_added
