"""What autograd saves in the forward of streamed weights: of a weight only where it is, and not its memory.

Also what else begins and ends with forward and backward passes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from lockstep.offload.weights.device.slots import storage_of
from lockstep.offload.weights.device.working import Working
from lockstep.offload.weights.groups import WeightGroup
from lockstep.torch_internals import autograd as torch_autograd
from lockstep.torch_internals import tensors as torch_tensors


@dataclass(frozen=True)
class SavedView:
    """A view of a unit's memory, wherever this is."""

    unit: Any
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # bytes
    conjugated: bool
    negated: bool

    @staticmethod
    def of(unit: Any, tensor: torch.Tensor) -> SavedView:
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return SavedView(
            unit,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            offset,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def marked(self, view: torch.Tensor) -> torch.Tensor:
        """With the bits of lazy conjugation and negation."""
        view = view.conj() if self.conjugated else view
        return torch_tensors.negated_lazily(view) if self.negated else view


@dataclass(frozen=True)
class SavedCast:
    """A view of what autocast made of a weight."""

    unit: Any
    working: Working
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements


class SavedWeights(Protocol):
    """Where the weights of units are."""

    def unit_of_storage(self, storage: int) -> Any | None: ...

    def unit_of_parameter(self, tensor: torch.Tensor) -> tuple[Any, Working] | None: ...

    def working_at(self, unit: Any, offset: int) -> Working:
        """What has the byte at ``offset`` of the unit's memory."""

    def view(self, saved: SavedView) -> torch.Tensor:
        """In the memory that the unit has now; it is loaded if it has none."""

    def cast(self, saved: SavedCast) -> torch.Tensor: ...


def saved_tensors_hooks_of(weights: SavedWeights) -> saved_tensors_hooks:
    """Replace what autograd saves of ``weights``. Other tensors are left to the hooks around these, if any."""
    outer = torch_autograd.saved_tensors_hooks_now()

    def pack(tensor: torch.Tensor) -> _Packed:
        saved = _recipe(weights, tensor)
        if saved is not None:
            working = (
                saved.working
                if isinstance(saved, SavedCast)
                else weights.working_at(saved.unit, saved.offset)
            )
            return _Weight(weights, saved, working, working.version)
        if outer is not None:
            return _Other(outer[1], outer[0](tensor))
        # Itself it would keep its own graph alive.
        return _Kept(tensor.detach(), torch_tensors.version(tensor))

    return saved_tensors_hooks(pack, lambda packed: packed.unpack())


class _Packed:
    def unpack(self) -> torch.Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class _Weight(_Packed):
    weights: SavedWeights
    saved: SavedView | SavedCast
    working: Working
    version: tuple[int, int]

    def unpack(self) -> torch.Tensor:
        if self.working.version != self.version:
            raise _modified(self.saved.size)
        if isinstance(self.saved, SavedCast):
            return self.weights.cast(self.saved)
        return self.weights.view(self.saved)


@dataclass(frozen=True)
class _Other(_Packed):
    outer_unpack: Any
    packed: object

    def unpack(self) -> torch.Tensor:
        return self.outer_unpack(self.packed)


@dataclass(frozen=True)
class _Kept(_Packed):
    tensor: torch.Tensor
    version: int

    def unpack(self) -> torch.Tensor:
        if torch_tensors.version(self.tensor) != self.version:  # torch leaves this check to hooks
            raise _modified(tuple(self.tensor.shape))
        return self.tensor


def _recipe(weights: SavedWeights, tensor: torch.Tensor) -> SavedView | SavedCast | None:
    if tensor.layout is not torch.strided or not torch_tensors.has_storage(tensor):
        return None
    unit = weights.unit_of_storage(storage_of(tensor))
    if unit is not None:
        return SavedView.of(unit, tensor)
    base = torch_tensors.base_of(tensor)
    leaf = _cast_parameter(base)
    found = None if leaf is None else weights.unit_of_parameter(leaf)
    if found is None or tensor.dtype != base.dtype or not _lies_like(base, found[1]):
        return None
    size, stride = tuple(tensor.shape), tensor.stride()
    return SavedCast(*found, tensor.dtype, size, stride, int(tensor.storage_offset()))


def _cast_parameter(tensor: torch.Tensor) -> torch.Tensor | None:
    """The parameter that ``tensor`` was cast from, and not been written to since."""
    cast: Any = tensor.grad_fn
    if type(cast).__name__ != "ToCopyBackward0" or torch_tensors.version(tensor):
        return None
    return getattr(cast.next_functions[0][0], "variable", None)


def _lies_like(tensor: torch.Tensor, working: Working) -> bool:
    """Whether a cast of ``working`` has the elements where ``tensor`` has them."""
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

    def __exit__(self, *error: Any) -> None:
        self._grad.__exit__(*error)
        self._inference.__exit__(*error)
