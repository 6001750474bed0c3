"""The table of the audit: which run stops where, and goes on how."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from checkpoint.audit.loaders import EPOCHS, KINDS, Kind

WORLDS = [(1, 1), (2, 2), (2, 1), (1, 2), (2, 4)]
STRATEGIES = ["ddp", "zero=1", "zero=2", "zero=3"]
PRECISIONS = ["no", "no", "bf16", "fp16"]
WINDOW = 3
"""Micro-batches of an accumulation window, where there is one."""


@dataclass(frozen=True)
class Trial:
    """One run that stops and goes on.

    - ``parallel``: how the model is spread before and after the stop.
    - ``stop``: micro-batches that the run has behind it when it saves and stops.
    - ``behind_loop``: at the end of an epoch it saves behind the loop instead of inside of it.
    - ``kill_after``: instead, the run saves again and again, and all its processes get SIGKILL so many seconds
      after a checkpoint was published; None: it stops by itself.
    """

    kind_name: str
    before: int
    after: int
    parallel: tuple[str, str]
    precision: str
    accumulation: int
    optimizer: str
    clips: bool
    seed: int
    stop: int
    behind_loop: bool = False
    kill_after: float | None = None

    @property
    def kind(self) -> Kind:
        return KINDS[self.kind_name]

    @property
    def same_world(self) -> bool:
        """Whether the run that goes on must be bit for bit the one that was not interrupted."""
        return self.before == self.after

    @property
    def saves_windows(self) -> bool:
        """Whether it may stop inside of an accumulation window: each rank has the whole model before and after."""
        return self.same_world and self.parallel[0] in ("auto", "ddp")

    def __str__(self) -> str:
        stop = (
            f"stop {self.stop}" if self.kill_after is None else f"killed {self.kill_after:.3f} s after a save"
        )
        words = [self.kind_name, f"{self.before} -> {self.after}", " -> ".join(self.parallel), self.precision]
        return ", ".join(
            [
                *words,
                f"window {self.accumulation}",
                self.optimizer,
                f"clips {self.clips}",
                f"seed {self.seed}",
                stop,
            ]
        )


def draw_trial(before: int, after: int, number: int, kills: bool = False) -> Trial:
    """The trial of this number: kinds, windows, optimizers and notable stops in turn, the rest by chance."""
    draw = random.Random(f"{before} {after} {number}")
    name = list(KINDS)[number % len(KINDS)]
    accumulation = (1, WINDOW)[number % 2]
    same_world = before == after
    trial = Trial(
        kind_name=name,
        before=before,
        after=after,
        parallel=_parallel(before, after, draw),
        precision=draw.choice(PRECISIONS) if same_world else "no",
        accumulation=accumulation,
        optimizer=("sgd", "adamw")[number // 2 % 2],
        clips=draw.random() < 0.5,
        seed=draw.randrange(10**6),
        stop=_stop(number, KINDS[name].steps(before), accumulation, draw),
        behind_loop=draw.random() < 0.5,
        kill_after=draw.choice([0.0, draw.uniform(0, 0.05), draw.uniform(0, 0.3)]) if kills else None,
    )
    if trial.saves_windows:
        return trial
    return replace(trial, stop=trial.stop - trial.stop % KINDS[name].steps(before) % accumulation)


def _parallel(before: int, after: int, draw: random.Random) -> tuple[str, str]:
    first = draw.choice(STRATEGIES) if before > 1 else "auto"
    if before == after:
        return first, first
    return first, draw.choice(STRATEGIES) if after > 1 else "auto"


def _stop(number: int, steps: int, accumulation: int, draw: random.Random) -> int:
    """In turn: anywhere, behind an epoch's first micro-batch, behind its last, and inside of a window."""
    epoch = draw.randrange(EPOCHS)
    anywhere = draw.randrange(EPOCHS * steps)
    midway = epoch * steps + draw.choice(
        [n for n in range(1, steps) if accumulation == 1 or n % accumulation]
    )
    return [anywhere, midway, anywhere, epoch * steps + 1, midway, steps, anywhere][number // 2 % 7]
