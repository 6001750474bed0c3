"""Weights that a script changes by hand while they are gathered: in a forward, before backward, or in a window.

The change goes into a rank's rows of the whole parameter, and from these into its shard (``fsdp2_gathered``). So it
must be the same on all ranks, as in plain torch one process makes one change: each rank keeps a number of what was
changed, and they compare these with the gradients of a step.
"""

from __future__ import annotations

from typing import Any

import torch

from lockstep.errors import UsageError
from lockstep.torch_internals import fsdp2
from lockstep.torch_internals.dtensor_operators import LostChanges
from lockstep.torch_internals.fsdp2_gathered import FSDPParam, WatchedGroup, watched_groups
from lockstep.torch_internals.tensors import bits_digest

DIGEST_BYTES = 4
"""Of a number that ranks share which made the same changes."""


class ChangesByHand:
    """Belongs to one sharded model.

    Args:
        root: The model.
        groups: torch's records of the parameters that are gathered together.
        is_exact: Weights are gathered as they are: not quantised.
    """

    def __init__(self, root: torch.nn.Module, groups: list[object], is_exact: bool) -> None:
        self._root = root
        self._numbers = {
            id(param): n for n, param in enumerate(p for group in groups for p in fsdp2.params(group))
        }
        self._digest = 0
        self._changed: Any = None
        self._lost: Any = None
        self.cleared: Any = None
        self._groups: list[WatchedGroup] = list(watched_groups(groups, is_exact, self._note, self._clear))

    def digest(self) -> bytes:
        """Equal on ranks that have made the same changes since the last one."""
        return (self._digest & (2 ** (8 * DIGEST_BYTES) - 1)).to_bytes(DIGEST_BYTES, "little")

    @property
    def are_there(self) -> bool:
        """Whether this rank has made some since ``check``."""
        return self._changed is not None

    def notice_data(self, lost_changes: LostChanges) -> None:
        """Be told when a script asks for the ``data`` of a shard, which versions do not show."""
        for group in self._groups:
            for shard, call in group.shards():
                lost_changes.notice_data(shard, call)

    def shards_changed(self) -> bool:
        """Whether shards were written to while their wholes are gathered, which do not show that."""
        return any(group.shards_changed() for group in self._groups)

    def check(self, are_equal: bool = True) -> None:
        """Raise UsageError if changes are lost, or are not the same on all ranks. Forgets them."""
        changed, lost = self._changed, self._lost
        self._digest, self._changed, self._lost = 0, None, None
        if lost is not None:
            param, why = lost
            raise UsageError(
                f"'{self._name(param)}' of {self._kind} was changed by hand while it was gathered {why}. Change "
                "weights after optimizer.step(), before the forward of the next window."
            )
        if not are_equal:
            what = "A weight" if changed is None else f"'{self._name(changed)}'"
            raise UsageError(
                f"{what} of {self._kind} was changed by hand in this step while it was gathered (inside of a forward, "
                "between forward and backward, or in an accumulation window), and not to the same numbers on all "
                "ranks, so that rows of different weights were put together. Make the change on all ranks, of numbers "
                "that are equal on all of them, such as accelerator.reduce(tensor, 'mean')."
            )

    def check_lost(self) -> None:
        """Raise UsageError before a step if changes are lost."""
        if self._lost is not None:
            self.check()

    def _note(self, param: FSDPParam, whole: torch.Tensor, is_lost: bool) -> None:
        self._changed = param
        if is_lost and self._lost is None:
            self._lost = param, self._reason(param, whole)
        number = 0 if is_lost else bits_digest(whole)
        self._digest = hash((self._digest, self._numbers[id(param)], number, is_lost))

    @staticmethod
    def _reason(param: FSDPParam, whole: torch.Tensor) -> str:
        shard = fsdp2.sharded_param(param)
        if whole.dtype != shard.dtype:
            return f"in {whole.dtype}, which is too coarse for the stored {shard.dtype}".replace("torch.", "")
        if whole.shape != shard.shape:
            return f"and has shape {tuple(whole.shape)} now, not {tuple(shard.shape)}"
        return "in a form from which the stored weights cannot be changed, or at two places at once"

    def _clear(self, param: FSDPParam) -> None:
        if self.cleared is not None:
            self.cleared({id(fsdp2.sharded_param(param))})

    @property
    def _kind(self) -> str:
        return type(self._root).__name__.removeprefix("FSDP")

    def _name(self, param: FSDPParam) -> str:
        forms = list(fsdp2.forms(param))
        return next((n for n, p in self._root.named_parameters() if any(p is f for f in forms)), "?")
