"""The faults of a soak: what each does, and what people must be told of it. No torch."""

from __future__ import annotations

import random
from dataclasses import dataclass

KINDS = (
    "kill worker",
    "kill launcher",
    "stop worker",
    "SIGTERM to launcher",
    "SIGUSR1 to launcher",
    "SIGTERM to worker",
    "SIGUSR1 to worker",
    "exception",
    "full disk",
)


@dataclass(frozen=True)
class Fault:
    """``kind`` strikes ``rank`` in ``step``, ``delay_s`` after the step has begun (an exception at its beginning)."""

    number: int
    kind: str
    step: int
    rank: int
    delay_s: float

    def words(self) -> tuple[str, ...]:
        """What a report that names rank and cause contains; empty where nobody is left to report."""
        rank = f"rank {self.rank}"
        return {
            "kill worker": (rank, "sigkill"),
            "kill launcher": (),
            "stop worker": (rank, "stopped"),
            "SIGTERM to launcher": ("sigterm",),
            "SIGUSR1 to launcher": ("sigusr1",),
            "SIGTERM to worker": ("sigterm",),
            "SIGUSR1 to worker": ("sigusr1",),
            "exception": (rank, f"injected error {self.number}"),
            # rank 0 looks for room before a save, so that it is the one to fail
            "full disk": ("rank 0", "0 are free there"),
        }[self.kind]


def draw(count: int, steps: int, ranks: int, seed: int, kinds: tuple[str, ...] = KINDS) -> list[Fault]:
    """``count`` faults at different steps, every kind equally often as far as possible, in a random order."""
    chance = random.Random(seed)
    drawn = [kinds[number % len(kinds)] for number in range(count)]
    chance.shuffle(drawn)
    # one in each part of the run, so that each is over before the next comes
    part = (steps - 10) / count
    return [
        Fault(
            number,
            kind,
            5 + int(part * number + chance.random() * part * 0.5),
            chance.randrange(ranks),
            chance.random() * 0.03,
        )
        for number, kind in enumerate(drawn)
    ]
