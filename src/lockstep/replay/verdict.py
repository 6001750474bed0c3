"""What a replay has found, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ReplayFinding:
    """The first thing that is wrong.

    Attributes:
        where: forward, backward, batch, loss or script.
        module: The name in its model; "" is the model itself, or, of the batch, the loss and the script, none.
        kind: The module's class.
        what: How its output, or gradient, is wrong, in words.
        operation: Of a backward.
        line: Of the code that called it.
        score: How many times its usual spread it is above the median; None: it is not finite.
        first_output: The module that was the first to return what is not finite, where that is another.
    """

    where: str
    module: str = ""
    kind: str = ""
    rank: int = 0
    micro_batch: int = 0
    what: str = ""
    operation: str = ""
    line: str = ""
    score: float | None = None
    first_output: str = ""


@dataclass(frozen=True)
class Compared:
    """A number of the run and of its replay. ``rank`` None: of all ranks."""

    what: str
    rank: int | None
    micro_batch: int | None
    run: float
    replay: float

    @property
    def is_same(self) -> bool:
        """Whether they are the same bits; NaN is NaN."""
        return self.run == self.replay or (self.run != self.run and self.replay != self.replay)


@dataclass(frozen=True)
class ReplayVerdict:
    """Of one capsule.

    Attributes:
        step: Its number in the run.
        spike: What the run said of it.
        ordinary: How many other micro-batches the capsule's were compared with; 0: that was not needed.
        notes: Sentences on what is not as it was in the run.
    """

    step: int
    spike: str
    finding: ReplayFinding | None
    compared: tuple[Compared, ...] = ()
    ordinary: int = 0
    notes: tuple[str, ...] = ()

    @property
    def has_same_bits(self) -> bool:
        """Whether all numbers that were compared are the same."""
        return all(one.is_same for one in self.compared)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> ReplayVerdict:
        finding = fields["finding"]
        return cls(
            fields["step"],
            fields["spike"],
            None if finding is None else ReplayFinding(**finding),
            tuple(Compared(**one) for one in fields["compared"]),
            fields["ordinary"],
            tuple(fields["notes"]),
        )
