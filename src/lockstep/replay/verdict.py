"""What a replay has found: as data, in a sentence, as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from lockstep.config.files import JsonObject


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
    def of(cls, fields: JsonObject) -> ReplayVerdict:
        finding = fields["finding"]
        return cls(
            fields["step"],
            fields["spike"],
            None if finding is None else ReplayFinding(**finding),
            tuple(Compared(**one) for one in fields["compared"]),
            fields["ordinary"],
            tuple(fields["notes"]),
        )


TITLES = ("of", "rank", "micro-batch", "in the run", "in the replay", "bits")
RIGHT = ("rank", "micro-batch", "in the run", "in the replay")


def sentence(verdict: ReplayVerdict) -> str:
    """Return what was the first to go wrong in the step."""
    found = verdict.finding
    if found is None:
        compared = (
            f", and near what it is in {verdict.ordinary} ordinary micro-batches" if verdict.ordinary else ""
        )
        return f"Nothing unusual in step {verdict.step} ({verdict.spike}): all is finite{compared}."
    of = f"in micro-batch {found.micro_batch + 1} of rank {found.rank}, step {verdict.step}"
    where = {
        "forward": f"{_named(found)} is the first to go wrong, {of}: {found.what}.",
        "backward": f"{_named(found)} is the first to go wrong in backward, {of}: {found.what}.",
        "batch": f"The batch is wrong, {of}: {found.what}.",
        "loss": f"The loss is the first to go wrong, {of}: {found.what}.",
        "script": f"The script's own code is the first to go wrong, {of}: {found.what}.",
    }[found.where]
    further = [
        *([f"First output that is not finite: {found.first_output}."] if found.first_output else []),
        *([f"Operation: {found.operation}."] if found.operation else []),
        *([found.line] if found.line else []),
    ]
    return " ".join([where, *further])


def _named(found: ReplayFinding) -> str:
    return f"{found.module} ({found.kind})" if found.module else f"{found.kind}, the model itself,"


def rows(verdict: ReplayVerdict) -> list[tuple[str, ...]]:
    """Return a line for each number that the run and its replay have."""
    return [_row(one) for one in verdict.compared]


def _row(one: Compared) -> tuple[str, ...]:
    rank = "all" if one.rank is None else str(one.rank)
    number = "" if one.micro_batch is None else str(one.micro_batch + 1)
    return one.what, rank, number, f"{one.run:.9g}", f"{one.replay:.9g}", "same" if one.is_same else "differ"


def remarks(verdict: ReplayVerdict) -> list[str]:
    """Sentences on how far the replay is the run's step."""
    found = list(verdict.notes)
    if not verdict.has_same_bits:
        found.append(
            "The replay has other numbers than the run, so it is not the same step to the last bit. Replay with "
            "the same script, arguments, torch and machine. A model that was split over ranks or compiled "
            "rounds differently in the replay."
        )
    return found


def to_json(verdict: ReplayVerdict) -> dict[str, object]:
    """Return all of it as JSON."""
    return {
        "format": "lockstep replay 1",
        "sentence": sentence(verdict),
        "same_bits": verdict.has_same_bits,
        **verdict.to_json(),
    }
