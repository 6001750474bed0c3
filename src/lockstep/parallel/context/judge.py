"""Whether a block may run on a part of the sequence: its rehearsal decides of what was suspected in its first call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.tree import leaves
from lockstep.errors import LockstepError
from lockstep.model.blocks import settings
from lockstep.parallel.context.checks import InBlock
from lockstep.parallel.context.rehearse import UNKNOWN, BlockCall, Verdict, rehearse
from lockstep.runtime import failure


@dataclass
class Judge:
    """Of one model's blocks. ``verdicts``: of each block that has run, and its settings, which each call compares;
    ``rehearses``: off in some tests."""

    rehearses: bool = True
    verdicts: dict[tuple[str, str], Verdict] = field(default_factory=dict)

    def __call__(self, block: nn.Module, call: BlockCall, mode: InBlock) -> None:
        """Judge the first call of each block that learns, or in which something is suspected.

        Raises:
            UsageError: it mixes positions outside of attention; on all ranks alike.
        """
        if not torch.is_grad_enabled() and not mode.suspicions:
            return
        key = call.block, settings(block)
        verdict = self.verdicts.get(key)
        if verdict is None:
            verdict = rehearse(block, call, mode.of_length) if self.rehearses else UNKNOWN
            self.verdicts[key] = verdict
        if verdict.mixing is not None:
            mode.refuse_suspected(verdict.mixing)
            mode.refuse(
                "mixes positions outside of attention, as running it on some of them shows (it begins with "
                f"{verdict.mixing}), but each rank holds a part of the sequence",
                "Leave this block out with blocks=..., or do it before or after the blocks",
            )
        for function in verdict.suspected if verdict.is_known else [None]:
            mode.refuse_suspected(function)

    def failed(self, block: Any, call: BlockCall, mode: InBlock, error: Exception) -> None:
        """The first call of a block raises.

        Raises:
            UsageError: maybe because it has a part of the sequence. Errors that are no consequence of that are left.
        """
        if isinstance(error, (LockstepError, torch.OutOfMemoryError)) or failure.is_consequence(error):
            return
        if (call.block, settings(block)) in self.verdicts:
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
