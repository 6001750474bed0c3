"""What an attention mask says where it says what is known without it: every key is seen, or none after the query."""

from __future__ import annotations

import weakref
from enum import Enum

import torch
from torch import Tensor

from lockstep.torch_internals import tensors as torch_tensors


class Visible(Enum):
    """The keys that a query sees."""

    ALL = "all"
    UP_TO_QUERY = "those up to itself"
    OTHER = "others"


class Masks:
    """What masks [..., S, S] or [..., 1, S] say. Each is looked at once, since blocks get the same one."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, Visible]] = {}

    def visible(self, mask: Tensor) -> Visible:
        """Waits for the device where the mask is a new one."""
        known = self._seen.get(id(mask))
        if known is not None and known[0]() is mask and known[1] == torch_tensors.version(mask):
            return known[2]
        found = _visible(mask.detach())
        self._seen = {key: entry for key, entry in self._seen.items() if entry[0]() is not None}
        self._seen[id(mask)] = (weakref.ref(mask), torch_tensors.version(mask), found)
        return found

    def __deepcopy__(self, memo: object) -> Masks:
        return Masks()


def _visible(mask: Tensor) -> Visible:
    if mask.dtype is torch.bool:
        shown, hidden = mask, ~mask
    elif mask.is_floating_point() and not mask.requires_grad:
        shown, hidden = mask == 0, mask <= torch.finfo(mask.dtype).min
    else:
        return Visible.OTHER
    if bool(shown.all()):
        return Visible.ALL
    before = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if mask.shape[-1] == mask.shape[-2] and bool(torch.where(before, shown, hidden).all()):
        return Visible.UP_TO_QUERY
    return Visible.OTHER
