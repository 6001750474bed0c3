"""Parts of DTensors that torch copies, where plain torch gives views, and what shares the memory of a parameter."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.torch_internals.tensors import storage_key

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

OF_CONTIGUOUS = ("flatten", "reshape", "ravel")
VIEWS = (
    *("select", "narrow", "diagonal", "unbind", "split", "chunk", "tensor_split", "view", "view_as"),
    *OF_CONTIGUOUS,
)
"""Methods whose results are parts of the tensor itself in plain torch; the last three if it is contiguous."""

StorageOffset = tuple[int, int]
"""A storage, and where in it a tensor begins."""
_SHARERS: dict[StorageOffset, weakref.WeakValueDictionary[int, torch.Tensor]] = {}
"""The parts of DTensors in the memory of a parameter, by their ``id``. Not these DTensors: torch swaps parameters,
as in ``model.to()``, only if nothing has a weak reference to them."""


def marking(in_torch: Callable[..., object]) -> Callable[..., object]:
    """Return the method of DTensor with a mark on parts that it copies: the shape of the whole tensor."""

    @functools.wraps(in_torch)
    def view(tensor: DTensor, *args: object, **kwargs: object) -> object:
        found = in_torch(tensor, *args, **kwargs)
        name = in_torch.__name__
        if (name in OF_CONTIGUOUS and not tensor.is_contiguous()) or (
            name == "__getitem__" and not _is_view(args[0])
        ):
            return found
        for part in found if isinstance(found, (tuple, list)) else (found,):
            copied_of = getattr(tensor, "_copied_of", None)
            copy = getattr(part, "_local_tensor", None)
            # A part with memory of its own is a copy: what is written to it, torch would lose without a word.
            if copy is not None and storage_key(copy) != storage_key(tensor._local_tensor):
                copied_of = copied_of or tensor.shape
            if copied_of is not None:
                part._copied_of = copied_of
        return found

    return view


def keeping_mark(in_torch: Callable[..., object]) -> Callable[..., object]:
    """Return the method of DTensor, whose result is such a copy if the tensor is one."""

    @functools.wraps(in_torch)
    def same(tensor: DTensor) -> object:
        found = in_torch(tensor)
        if hasattr(tensor, "_copied_of"):
            found._copied_of = tensor._copied_of  # type: ignore[attr-defined]
        return found

    return same


def sharing(in_torch: Callable[..., object]) -> Callable[..., object]:
    """Return the method of DTensor, whose results are known as tensors in the memory of a parameter."""
    get = keeping_mark(in_torch)

    @functools.wraps(in_torch)
    def share(tensor: DTensor) -> object:
        found = get(tensor)
        # While it is gathered, what it gives is whole.
        if isinstance(tensor, nn.Parameter) and hasattr(found, "_local_tensor"):
            part: Any = found._local_tensor
            part._parameter = id(tensor), tensor.requires_grad
            _SHARERS.setdefault(_memory(part), weakref.WeakValueDictionary())[id(part)] = part
        return found

    return share


def shares_memory(tensor: DTensor, other: DTensor) -> bool:
    """Return whether both have the same part in memory."""
    return _memory(tensor._local_tensor) == _memory(other._local_tensor)


def keep_values(tensor: DTensor) -> None:
    """Give what shares the memory of a parameter a copy, as the parameter is about to get other values by ``.data``."""
    own: Any = tensor._local_tensor
    sharers: list[Any] = list(_SHARERS.get(_memory(own), {}).values())
    for part in sharers:
        if part is not own and _memory(part) == _memory(own):
            part.data = part.clone()
            del part._parameter


def refuse_tie(tensor: DTensor, value: DTensor) -> None:
    """Raise UsageError for a value in the memory of another parameter that is trained."""
    owner, is_trained = (
        (id(value), value.requires_grad)
        if isinstance(value, nn.Parameter)
        else getattr(value._local_tensor, "_parameter", (0, False))
    )
    if is_trained and owner != id(tensor):
        raise UsageError(
            f"A parameter of shape {tuple(tensor.shape)} got the memory of another one, as by head.weight.data = "
            "embedding.weight.data. Ranks have parts of both, so they would not stay tied. Tie the parameters before "
            "prepare(): head.weight = embedding.weight. Or copy the values: head.weight.data = "
            "embedding.weight.data.clone()."
        )


def _memory(part: torch.Tensor) -> StorageOffset:
    return storage_key(part), int(part.storage_offset())


def refuse_change_of_copy(tensor: DTensor) -> None:
    """Raise UsageError if a tensor that is about to be changed in place is such a copy."""
    shape = getattr(tensor, "_copied_of", None)
    if shape is not None:
        raise UsageError(
            f"A part of a sharded tensor of shape {tuple(shape)} was changed in place, as by w[0].zero_() or "
            "w[0] *= 2. The part is a copy, so the tensor would not change. Assign to the tensor: w[0] = 0, or "
            "w[0] = w[0] * 2."
        )


def _is_view(index: object) -> bool:
    """Return whether plain torch gives a view for this index, and no copy."""
    of = index if isinstance(index, tuple) else (index,)
    return all(
        one is None
        or one is Ellipsis
        or isinstance(one, (int, slice))
        or (isinstance(one, torch.Tensor) and not one.dim() and one.dtype != torch.bool)
        for one in of
    )
