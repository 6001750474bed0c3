"""What one run of a script is to do, as a file that its processes read, and what it leaves."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from lockstep.checkpoint.format.documents import validated
from lockstep.config.files import JsonObject


class Role(str, Enum):
    """What a run is for."""

    REFERENCE = "reference"
    REPEAT = "repeat"
    DISTURBED = "disturbed"
    HALF = "half"
    WHOLE = "whole"
    CANDIDATE = "candidate"


@dataclass(frozen=True)
class RunSpec:
    """One run.

    Attributes:
        folder: Where it leaves what it has found.
        ranks: Processes of the candidate.
        trace: Of the reference; None: this run writes it.
        allowed: A file with how far each item may be from the reference.
        parallel: The words for models; None: those of the script.
        mixed_precision: Likewise.
        is_alone: Whether one process, plain and in fp32, stands for all ranks.
        wrapped: Whether the script spreads its models itself, without an ``Accelerator`` of this library.
        reports_ranks: Whether it tells the script of as many processes, and of as short loaders, as the candidate has.
    """

    role: Role
    folder: str
    steps: int
    seed: int
    ranks: int
    trace: str | None = None
    allowed: str | None = None
    parallel: str | None = None
    mixed_precision: str | None = None
    as_accelerate: bool = False
    is_module: bool = False
    is_alone: bool = True
    reports_ranks: bool = False
    wrapped: bool = False

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)), "utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> RunSpec:
        fields = json.loads(path.read_text("utf-8"))
        return cls(Role(fields.pop("role")), **fields)


@dataclass(frozen=True)
class ProcessFacts:
    """What one process of a run tells of it.

    Attributes:
        made: Optimizer steps.
        data_ranks: Ranks with batches of their own.
        data_rank: Whose batches this process had; 0 where it had all.
        axes: Its place on each axis of the mesh: name -> (size, index).
        parallel: The words for models that hold in the candidate.
        accumulation: Micro-batches for each step, as the script asked.
        notes: Sentences on what was changed or seen.
        ended: Why there are no more steps.
        sets_rate: Whether the script changes learning rates without a scheduler.
        failed: The error that ended the script.
        seed: Of the run.
        steps_asked: Optimizer steps after which it was to end.
        drops_out: Whether dropout was left on.
        knows_rows: Whether one process can tell which rows each of several ranks would have read.
        refused: Why one process cannot stand for several ranks, and what to do.
        draws: Whether random numbers were drawn between a batch and its backward.
    """

    rank: int = 0
    made: int = 0
    data_ranks: int = 1
    data_rank: int = 0
    axes: dict[str, tuple[int, int]] = field(default_factory=dict)
    parallel: str = ""
    mixed_precision: str = "no"
    accumulation: int = 1
    notes: tuple[str, ...] = ()
    ended: str = ""
    sets_rate: bool = False
    failed: str = ""
    seed: int = 0
    steps_asked: int = 0
    drops_out: bool = True
    knows_rows: bool = True
    refused: str = ""
    draws: bool = False

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    def write(self, folder: Path) -> None:
        """Leave them in a run's folder."""
        path = folder / f"facts-{self.rank}.json"
        path.with_suffix(".partial").write_text(json.dumps(self.to_json()), "utf-8")
        # A process that is killed meanwhile leaves no half file.
        os.replace(path.with_suffix(".partial"), path)

    @classmethod
    def read_all(cls, folder: Path) -> list[ProcessFacts]:
        """Read the facts of all processes of a run that came to their end, by rank."""
        found = [cls.of(json.loads(path.read_text("utf-8"))) for path in folder.glob("facts-*.json")]
        return sorted(found, key=lambda one: one.rank)

    @classmethod
    def of(cls, fields: JsonObject) -> ProcessFacts:
        """Return what ``to_json`` made. Raises ValueError: a value is of another kind."""
        return validated(cls, fields, "facts")
