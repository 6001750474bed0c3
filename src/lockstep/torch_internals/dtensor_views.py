"""Parts of DTensors that torch copies, where plain torch gives views, and whether a script changes them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.torch_internals.tensors import storage_key

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

VIEWS = ("select", "narrow", "diagonal", "unbind", "split", "chunk", "view")
"""Methods whose results are parts of the tensor itself in plain torch."""


class LostChanges:
    """Parts of DTensors that torch has copied, where plain torch gives views, and whether a script changes them.

    Attributes:
        parts: Those that a script still has: the memory of the part -> the shape of the whole tensor.
    """

    def __init__(self) -> None:
        self.parts: dict[int, torch.Size] = {}
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
            self.parts[storage_key(copy)] = tensor.shape
            # Another tensor may get the address once the part is gone.
            weakref.finalize(part, self.parts.pop, storage_key(copy), None)

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

    def changed(self) -> tuple[int, ...] | None:
        """The shape of a tensor of which a copied part was changed since the last call."""
        if not self._changed:
            return None
        found, self._changed = tuple(next(iter(self._changed.values()))), {}
        return found


def noting(in_torch: Callable[..., object], lost: LostChanges) -> Callable[..., object]:
    @functools.wraps(in_torch)
    def view(tensor: DTensor, *args: object, **kwargs: object) -> object:
        found = in_torch(tensor, *args, **kwargs)
        if in_torch.__name__ != "__getitem__" or _is_view(args[0]):
            for part in found if isinstance(found, (tuple, list)) else (found,):
                lost.note(tensor, part)
        return found

    return view


def _is_view(index: object) -> bool:
    """Whether plain torch gives a view for this index, and no copy."""
    of = index if isinstance(index, tuple) else (index,)
    return all(one is None or one is Ellipsis or isinstance(one, (int, slice)) for one in of)
