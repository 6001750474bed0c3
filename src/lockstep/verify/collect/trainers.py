"""transformers' Trainer, which counts and weighs the batches of a step itself: it is told of more of them."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


def accumulate_more(times: int) -> int:
    """Let the Trainer that makes an ``Accelerator`` now, if one does, take so many times the batches for each step.

    Its losses are then those of all these batches together, by their numbers of tokens too. Returns how many batches
    it would have taken; 0: there is no Trainer.
    """
    window = window_of_trainer()
    if window:
        set_window_of_trainer(window * times)
    return window


def window_of_trainer() -> int:
    """Return how many batches it takes for each step; 0: there is no Trainer."""
    trainer = _calling_trainer()
    return 0 if trainer is None else int(trainer.args.gradient_accumulation_steps)


def set_window_of_trainer(batches: int) -> None:
    """Let it take so many."""
    trainer = _calling_trainer()
    trainer.args.gradient_accumulation_steps = batches


def _calling_trainer() -> Any:
    module = sys.modules.get("transformers.trainer")
    if module is None:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, module.Trainer):
            return owner
        frame = frame.f_back
    return None
