"""What is measured of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(slots=True)
class StepMeasures:
    """One optimizer step, with all micro-batches of its window, from one boundary to the next. None: not known.

    Attributes:
        step: Steps of the run up to and with this one, from 1, also over restarts.
        time: When it ended, in Unix seconds.
        epoch: Of the prepared loader that gave its last batch.
        samples, tokens: Trained on in it, over all ranks.
        loss: On this rank, of what the script passed to ``backward``: the mean over the micro-batches of the window, by
            their weights where they have any; without ``gradient_accumulation_steps`` the sum over a step's backwards.
        gradient_norm: As ``clip_grad_norm_`` returned it, before clipping.
        learning_rate: Of each group of parameters, of at most 8 groups.
        seconds: By part, and their sum as ``total``.
        flops: Floating-point operations over all ranks: ``model``, of forward and backward; ``hardware``, with those of
            forwards that are computed again.
        memory: Bytes of this rank at the ``peak``, where that has grown.
        rank_seconds: What each rank's own work of a step took lately, without waits for others.
        logged: Numbers that the script passed to ``accelerator.log`` since the step before.
    """

    step: int
    time: float
    epoch: int | None = None
    samples: int | None = None
    tokens: float | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    learning_rate: list[float] | None = None
    seconds: dict[str, float] | None = None
    flops: dict[str, float] | None = None
    memory: dict[str, int] | None = None
    rank_seconds: list[float | None] | None = None
    logged: dict[str, float] | None = None

    def line(self) -> dict[str, Any]:
        """Return what is known, for a file."""
        found = {name: getattr(self, name) for name in _NAMES}
        return {name: value for name, value in found.items() if value is not None}


_NAMES = tuple(field.name for field in fields(StepMeasures))
