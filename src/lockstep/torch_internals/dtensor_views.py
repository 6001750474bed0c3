"""Parts of DTensors that torch copies, where plain torch gives views, and whether a script changes them."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.errors import UsageError
from lockstep.torch_internals.tensors import storage_key

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

VIEWS = (
    *("select", "narrow", "diagonal", "unbind", "split", "chunk", "tensor_split", "view", "view_as"),
    *("flatten", "reshape", "ravel"),
)
"""Methods whose results are parts of the tensor itself in plain torch; the last three if it is contiguous."""


class LostChanges:
    """Parts of DTensors that torch has copied, where plain torch gives views, and whether a script changes them.

    Attributes:
        parts: Those that a script still has: the memory of the part -> the shape of the whole tensor.
    """

    def __init__(self) -> None:
        self.parts: dict[int, torch.Size] = {}
        self._alive: Counter[int] = Counter()
        self._changed: dict[int, torch.Size] = {}
        # By identity: ``==`` of tensors compares their elements.
        self._noticed: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def notice_data(self, tensor: DTensor, call: Callable[[], None]) -> None:
        """``call``, a method, before a script gets the ``data`` of this tensor, to which it can write unnoticed."""
        self._noticed[tensor] = weakref.WeakMethod(call)

    def data_is_taken(self, tensor: torch.Tensor) -> None:
        found = self._noticed.get(tensor)
        call = None if found is None else found()
        if call is not None:
            call()

    def note(self, tensor: DTensor, part: object) -> None:
        """``part`` was taken of ``tensor``."""
        copy = getattr(part, "_local_tensor", None)
        # A part with memory of its own is a copy: what is written to it, torch would lose without a word.
        if copy is not None and storage_key(copy) != storage_key(tensor._local_tensor):
            key = storage_key(copy)
            self.parts[key] = tensor.shape
            self._alive[key] += 1
            weakref.finalize(part, self._forget, key)

    def _forget(self, key: int) -> None:
        self._alive[key] -= 1
        # Another tensor may get the address once all parts that share it, as those of a chunk, are gone.
        if not self._alive[key]:
            del self._alive[key], self.parts[key]

    def changes(self, tensor: DTensor) -> None:
        """``tensor`` is changed in place. Call it only if there are ``parts``."""
        key = storage_key(tensor._local_tensor)
        if key in self.parts:
            self._changed[key] = self.parts[key]

    def forgive(self, part: object) -> None:
        """It is written back: ``tensor[0] *= 2`` does so."""
        copy = getattr(part, "_local_tensor", None)
        if copy is not None:
            self._changed.pop(storage_key(copy), None)

    def check(self) -> None:
        """Raise UsageError if a copied part of a tensor was changed since the last call."""
        if not self._changed:
            return
        found, self._changed = tuple(next(iter(self._changed.values()))), {}
        raise UsageError(
            f"A part of a sharded tensor of shape {found} was changed in place, as by w[0].zero_(), but the part is a "
            "copy, so the tensor did not change. Assign to the tensor: w[0] = 0, or w[0] *= 2."
        )


def noting(in_torch: Callable[..., object], lost: LostChanges) -> Callable[..., object]:
    @functools.wraps(in_torch)
    def view(tensor: DTensor, *args: object, **kwargs: object) -> object:
        # What an assignment would have written back is lost by now.
        lost.check()
        found = in_torch(tensor, *args, **kwargs)
        is_copy = in_torch.__name__ in VIEWS[-3:] and not tensor.is_contiguous()
        if not is_copy and (in_torch.__name__ != "__getitem__" or _is_view(args[0])):
            for part in found if isinstance(found, (tuple, list)) else (found,):
                lost.note(tensor, part)
        return found

    return view


def _is_view(index: object) -> bool:
    """Whether plain torch gives a view for this index, and no copy."""
    of = index if isinstance(index, tuple) else (index,)
    return all(
        one is None
        or one is Ellipsis
        or isinstance(one, (int, slice))
        or (isinstance(one, torch.Tensor) and not one.dim() and one.dtype != torch.bool)
        for one in of
    )
