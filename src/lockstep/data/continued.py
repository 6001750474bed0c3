"""A loop that skips by itself what the loaded position of its loader has behind it already."""

from __future__ import annotations

import dis
import logging
import sys
from collections.abc import Iterator
from gc import get_referrers, is_tracked
from types import CellType, CodeType, FrameType, GeneratorType

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from lockstep.comm.tree import leaves
from lockstep.data.position import Progress
from lockstep.runtime.clock import StepClock
from lockstep.torch_internals import dispatch as torch_dispatch

YIELD_FROM = ("SEND", "YIELD_FROM")
"""Where a frame stands that hands on what another generator yields."""

logger = logging.getLogger(__name__)


def batches_behind(behind: Progress, rows: int | None) -> int:
    """How many batches of a rank are behind; the most that it can be where nobody has counted them.

    ``rows`` is how many samples the ranks have in a step (None: they vary).
    """
    # All was dealt in one way since the beginning, so rounds are batches.
    if not any(behind.base):
        return sum(behind.rounds)
    samples = sum(behind.samples)
    return -(-samples // rows) if rows else samples


def until_used(batch: object, behind: int, clock: StepClock, rank: int) -> Iterator[object]:
    """``batch``, the first one behind a loaded position; again while the loop skips it.

    Scripts that are written for loaders which begin anew pass over ``behind`` batches before they train on one. They
    get this one each time, so that theirs is the one that they would have got.
    """
    torch_dispatch.probe_function_modes()
    for number in range(behind + 1):
        use = BatchUse(batch, clock)
        try:
            yield batch
            if number == behind or use.was_made():
                return
        finally:
            use.end()
        if number == 0 and rank == 0:
            logger.warning(
                "The script skips the first batch after load_state, as if the loader began at its first batch. "
                "But the loader continues after %d batches by itself, so it returns its next batch again, at "
                "most %d times, until the script uses it. Remove the skip from the script.",
                behind,
                behind,
            )


class BatchUse:
    """What a loop does between one batch and the next: whether it looks like skipping.

    It does if the loop has a branch, and meanwhile no module and no function of torch was called, nothing was done that
    ``clock`` counts, and nothing but variables holds the batch.
    """

    def __init__(self, batch: object, clock: StepClock) -> None:
        self._clock, self._ticks = clock, clock.ticks
        parts = (batch, *leaves(batch).values())
        self._tensors = [part for part in parts if isinstance(part, torch.Tensor) or is_tracked(part)]
        self._holders = {id(one) for one in get_referrers(*self._tensors)}
        self._called = False
        self._functions = torch_dispatch.SeesFunctions()
        self._functions.begin()
        self._hook = register_module_forward_pre_hook(self._module_called)

    def was_made(self) -> bool:
        """Asked by the generator that the loop resumes."""
        seen = self._called or self._functions.has_seen or self._clock.ticks != self._ticks
        return seen or not self._may_skip() or self._is_referenced()

    def end(self) -> None:
        self._hook.remove()
        self._functions.end()

    def _module_called(self, *_: object) -> None:
        self._called = True
        # At the first call, so that nothing is compiled or slowed with it.
        self.end()

    def _may_skip(self) -> bool:
        loops = list(_loops(sys._getframe(2)))
        # The last is the script's; those within are of progress bars and the like.
        return bool(loops) and _has_branch(loops[-1])

    def _is_referenced(self) -> bool:
        frames = list(_frames(sys._getframe(1)))
        variables = [frame.f_globals for frame in frames]
        passing = (FrameType, GeneratorType, CellType, tuple, enumerate, zip)
        return any(
            id(holder) not in self._holders
            and not isinstance(holder, passing)
            and not any(
                holder is known for known in (self._tensors, self.__dict__, *self._tensors, *variables)
            )
            for holder in get_referrers(*self._tensors)
        )


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _loops(frame: FrameType) -> Iterator[FrameType]:
    """The frames whose ``for`` waits for the next item, from the loader's own outwards."""
    for waiting in _frames(frame):
        if waiting.f_globals.get("__package__") == __package__:
            continue
        operation = _operation(waiting.f_code, waiting.f_lasti).opname
        if operation == "FOR_ITER":
            yield waiting
        elif operation not in YIELD_FROM:
            return


def _has_branch(frame: FrameType) -> bool:
    """Whether the body of the loop that the frame is in has a condition."""
    end = _operation(frame.f_code, frame.f_lasti).argval
    return any(
        frame.f_lasti < one.offset < end and one.opname.startswith("POP_JUMP")
        for one in dis.get_instructions(frame.f_code)
    )


def _operation(code: CodeType, offset: int) -> dis.Instruction:
    """The one at ``offset``, which may be in what the interpreter keeps behind it."""
    return [one for one in dis.get_instructions(code) if one.offset <= offset][-1]
