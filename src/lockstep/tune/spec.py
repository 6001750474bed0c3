"""What one trial is to do, as a file that its processes read, and what each of its ranks leaves."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class TrialSpec:
    """One trial.

    Attributes:
        folder: Where each rank leaves its facts.
        micro_batch: Rows of a rank's micro-batch; None: as the script says, and so is ``accumulation``.
        accumulation: Micro-batches of a step.
        loader: Which of the loaders that the script prepares, from 0, gets this size.
        global_batch: Rows of a step over all ranks, where that is known.
        parallel: The words for models; None: those of the script.
        memory_limit: Bytes of each rank; None: what is free.
    """

    folder: str
    steps: int
    seed: int = 0
    micro_batch: int | None = None
    accumulation: int | None = None
    loader: int | None = None
    global_batch: int | None = None
    parallel: str | None = None
    memory_limit: int | None = None
    as_accelerate: bool = False
    is_module: bool = False

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)), "utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> TrialSpec:
        return cls(**json.loads(path.read_text("utf-8")))


@dataclass
class RankReport:
    """What one rank tells. It is written as the trial goes on, so that a rank that was killed has told what it knew.

    Attributes:
        data_ranks: Ranks with batches of their own.
        data_rank: The place among these.
        micro_batch: Rows of this rank's full batches; None: no batch has come, or they vary.
        accumulation: Batches of a step, as the script says.
        loader: The number of the loader that is trained on.
        split_batches: Whether that loader's own batch size is that of all ranks.
        samples: Of the loader's data; None: not known.
        drop_last: Whether its last batch is left out if it is short.
        uses_accumulate: Whether the loop says where micro-batches are, by ``accelerator.accumulate``.
        is_trainer: Whether transformers' Trainer counts.
        weighted: Whether losses have weights.
        made: Optimizer steps.
        rows: Rows of each step over all ranks, as loaders count them; padding left out.
        batches: Batches of each step on this rank.
        seconds: Of each step, from asking for its first batch to asking for the next step's.
        tokens: Of each step on this rank; 0: not known.
        first_loss: Of the first step, the mean over this rank's micro-batches; None: weighted.
        norms: Names of layers that take statistics of a micro-batch.
        peak: Bytes.
        limit: Bytes.
        over: Bytes at which this rank ended itself, because they were more than ``limit``.
        failed: The error that ended the script.
        out_of_memory: Whether that was want of memory.
        refused: Why this script cannot be tuned, and what to do.
    """

    rank: int = 0
    data_ranks: int = 1
    data_rank: int = 0
    micro_batch: int | None = None
    accumulation: int = 1
    loader: int | None = None
    split_batches: bool = False
    samples: int | None = None
    drop_last: bool = False
    uses_accumulate: bool = False
    is_trainer: bool = False
    weighted: bool = False
    made: int = 0
    rows: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    first_loss: float | None = None
    norms: list[str] = field(default_factory=list)
    peak: int = 0
    limit: int | None = None
    over: int | None = None
    failed: str = ""
    out_of_memory: bool = False
    refused: str = ""

    def write(self, folder: Path) -> None:
        # A rank that is killed meanwhile leaves no half file.
        path = folder / f"rank-{self.rank}.json"
        path.with_suffix(".partial").write_text(json.dumps(asdict(self)), "utf-8")
        os.replace(path.with_suffix(".partial"), path)

    @classmethod
    def read_all(cls, folder: Path) -> list[RankReport]:
        """Read the results of all ranks that have told something, by rank."""
        found = [cls(**json.loads(path.read_text("utf-8"))) for path in folder.glob("rank-*.json")]
        return sorted(found, key=lambda one: one.rank)
