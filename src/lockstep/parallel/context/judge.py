"""Whether a block may run on a part of the sequence: its rehearsal decides of what was suspected in its first call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lockstep.comm.tree import leaves
from lockstep.errors import LockstepError
from lockstep.parallel.blocks import settings
from lockstep.parallel.context.checks import InBlock
from lockstep.parallel.context.rehearse import UNKNOWN, Call, Verdict, rehearse
from lockstep.parallel.equal_modules import Found
from lockstep.runtime import failure


@dataclass
class Judge:
    """Of one model's blocks. ``verdicts``: of each block that has run, by its settings; ``rehearses``: off in tests."""

    rehearses: bool = True
    verdicts: WeakKeyDictionary[nn.Module, dict[str, Verdict]] = field(default_factory=WeakKeyDictionary)
    found: Found = field(default_factory=Found)

    def __call__(self, block: nn.Module, call: Call, mode: InBlock) -> None:
        """Judge the first call of each kind of block that learns, or in which something is suspected.

        Raises:
            UsageError: it mixes positions outside of attention; on all ranks alike.
        """
        if not torch.is_grad_enabled() and not mode.suspicions:
            return
        kind, verdicts = settings(block), self.verdicts.setdefault(block, {})
        verdict = verdicts.get(kind)
        if verdict is None:
            verdict = UNKNOWN
            if self.rehearses:
                verdict = self.found.of(block, None, lambda: rehearse(block, call, mode.of_length))
            verdicts[kind] = verdict
        if verdict.mixing is not None:
            mode.refuse_suspected(verdict.mixing)
            mode.refuse(
                "mixes positions outside of attention, as running it on some of them shows (it begins with "
                f"{verdict.mixing}), but each rank holds a part of the sequence",
                "Leave this block out with blocks=..., or do it before or after the blocks",
            )
        for function in verdict.suspected if verdict.is_known else [None]:
            mode.refuse_suspected(function)

    def failed(self, block: Any, call: Call, mode: InBlock, error: Exception) -> None:
        """The first call of a kind of block raises.

        Raises:
            UsageError: maybe because it has a part of the sequence. Errors that are no consequence of that are left.
        """
        if isinstance(error, (LockstepError, torch.OutOfMemoryError)) or failure.is_consequence(error):
            return
        if settings(block) in self.verdicts.get(block, {}):
            return
        try:
            mode.refuse_suspected()
            mode.refuse(*_cannot_run(mode, [*call.args, *call.kwargs.items()], error))
        except LockstepError as refusal:
            raise refusal from error


def _cannot_run(mode: InBlock, arguments: list[tuple[str, Any]], error: Exception) -> tuple[str, str]:
    """What to say of a block that raises, and what to do."""
    whole = mode.length * mode.layout.size
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    uncut = [
        f"{name} {list(leaf.shape)}"
        for name, value in arguments
        for leaf in leaves(value).values()
        if isinstance(leaf, Tensor) and whole in leaf.shape and mode.length not in leaf.shape
    ]
    beside = f" and the whole of {', '.join(uncut)}" if uncut else ""
    return (
        f"raises {type(error).__name__} ({text[:200]}), where this rank has {mode.length} of {whole} positions{beside}",
        mode.no_other
        or "Leave this block out with blocks=..., or do what needs all positions before or after the blocks",
    )
