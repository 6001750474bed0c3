"""What became of a trial, from the ledgers of its ranks and the state at its end."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from checkpoint.audit import plain
from checkpoint.audit.loaders import EPOCHS
from checkpoint.audit.run import AFTER, BEFORE, REFERENCE, Final
from checkpoint.audit.trials import Trial

LOSS_TOLERANCE, PARAMETER_TOLERANCE = 2e-6, 1e-5
Line = dict[str, Any]


@dataclass
class Verdict:
    """``start``: the micro-batch where the run went on. ``replayed``: those behind it that a kill had made vain.

    ``different`` names what should be bit-identical to the uninterrupted run and is not. None: not asked of this trial.
    """

    trial: str
    start: int
    wrong_samples: int
    different: list[str] | None = None
    loss_difference: float | None = None
    parameter_difference: float | None = None
    problems: list[str] = field(default_factory=list)
    replayed: int = 0

    @property
    def is_right(self) -> bool:
        return (
            not self.wrong_samples
            and not self.different
            and not self.problems
            and (self.loss_difference or 0.0) <= LOSS_TOLERANCE
            and (self.parameter_difference or 0.0) <= PARAMETER_TOLERANCE
        )


def judge(trial: Trial, folder: Path, finals: list[Final], reference: list[Final] | None) -> Verdict:
    """``finals``: of the ranks that went on. ``reference``: of an uninterrupted run, where the world is unchanged."""
    starts = {final.start for final in finals}
    start = finals[0].start
    whole = [read(folder, BEFORE, rank) for rank in range(trial.before)]
    first = [lines[:start] for lines in whole]
    second = [read(folder, AFTER, rank) for rank in range(trial.after)]
    steps = joined(first, trial.before) + joined(second, trial.after)
    verdict = Verdict(str(trial), start, wrong_samples(trial, steps), replayed=len(whole[0]) - start)
    numbers = [step.number for step in steps]
    if len(starts) > 1 or (trial.kill_after is None and start != trial.stop):
        verdict.problems.append(f"went on at micro-batch {sorted(starts)}")
    if numbers != list(range(len(steps))):
        verdict.problems.append(f"micro-batches {numbers}")
    if reference is not None:
        verdict.different = different(trial, folder, first, second, finals, reference)
        return verdict
    expected, parameters = plain.train(trial, [step.micro_batch for step in steps])
    pairs = [(step.loss, loss) for step, loss in zip(steps, expected, strict=True)]
    verdict.loss_difference = max(
        (abs(loss - other) / abs(other) for loss, other in pairs[start:]), default=0.0
    )
    if trial.optimizer == "sgd":
        verdict.parameter_difference = max(plain.difference(final.parameters, parameters) for final in finals)
    return verdict


@dataclass(frozen=True)
class Step:
    """A micro-batch of all ranks: the samples in rank order, and their mean loss."""

    number: int
    micro_batch: plain.MicroBatch
    loss: float
    padding: int


def read(folder: Path, leg: str, rank: int) -> list[Line]:
    return [json.loads(line) for line in (folder / f"{leg}-{rank}").read_text().splitlines()]


def joined(ranks: list[list[Line]], world: int) -> list[Step]:
    steps = []
    for lines in zip(*ranks, strict=True):
        assert len({(line["number"], line["epoch"]) for line in lines}) == 1
        rows = [
            row
            for line in lines
            for row in zip(line["samples"], line["losses"], line["is_sample"], strict=True)
        ]
        samples = [number for number, _, is_sample in rows if is_sample]
        losses = [loss for _, loss, is_sample in rows if is_sample]
        batch = plain.MicroBatch(lines[0]["epoch"], samples, world)
        mean = sum(losses) / max(1, len(losses))
        steps.append(Step(lines[0]["number"], batch, mean, len(rows) - len(losses)))
    return steps


def wrong_samples(trial: Trial, steps: list[Step]) -> int:
    """Samples that are missing, come twice, or come in another place; and padding before the end of an epoch."""
    kind, wrong = trial.kind, 0
    for epoch in range(EPOCHS):
        own = [step for step in steps if step.micro_batch.epoch == epoch]
        seen = [number for step in own for number in step.micro_batch.samples]
        order = kind.order(epoch, trial.seed)
        if kind.ordered:
            wrong += sum(a != b for a, b in zip_longest(seen, order))
            wrong += sum(step.padding for step in own[:-1] if not kind.splits)
        else:
            found, expected = Counter(seen), Counter(order)
            wrong += (found - expected).total() + (expected - found).total()
    return wrong


def different(
    trial: Trial,
    folder: Path,
    first: list[list[Line]],
    second: list[list[Line]],
    finals: list[Final],
    reference: list[Final],
) -> list[str]:
    """What each rank has seen, lost and become otherwise than in the uninterrupted run."""
    found = []
    for rank in range(trial.after):
        if first[rank] + second[rank] != read(folder, REFERENCE, rank):
            found.append(f"rank {rank}: samples or losses")
        mine, theirs = finals[rank].digests, reference[rank].digests
        names = sorted(mine.keys() | theirs.keys())
        found += [f"rank {rank}: {name}" for name in names if mine.get(name) != theirs.get(name)]
    return found
