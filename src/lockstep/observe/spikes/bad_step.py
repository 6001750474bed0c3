"""A step that is a spike, and what is asked of those who keep steps and take a run back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Spike(NamedTuple):
    """``kind``: loss or gradient_norm. ``score``: infinite where ``value`` is not finite."""

    kind: str
    value: float
    score: float


@dataclass(frozen=True)
class BadStep:
    """A step that is a spike, as all ranks know it; ``losses``, (loss, weight) of each backward, are this rank's.

    ``history``: (median, MAD) of the steps before, by kind. ``steps_since``: ``checkpoint``, the newest complete one.
    """

    step: int
    kind: str
    value: float
    score: float
    loss: float | None
    gradient_norm: float | None
    history: dict[str, tuple[float, float]]
    samples: int | None
    checkpoint: str
    steps_since: int | None
    losses: list[tuple[float, float]]


class GoesBack(Protocol):
    """Takes a run back to one of its checkpoints. Both are collective."""

    def leave_out(self, batches: int) -> tuple[int, int | None]:
        """Pass over the next micro-batches of each rank; how many they were, and all ranks' samples in them."""

    def load(self, path: str) -> None:
        """Be what the run was at this checkpoint, but for where its data stand."""


class KeepsSteps(Protocol):
    """Keeps what a rank trains on until its step is made."""

    def backward(self) -> None:
        """Note that what loaders handed out is trained on."""

    def forget(self) -> None:
        """Forget what was kept: the step is made, or is none."""

    def keep(self, bad: BadStep) -> str | None:
        """Write down what it takes to make this step again; returns where, None: nowhere. Collective."""
