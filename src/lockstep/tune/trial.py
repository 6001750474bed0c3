"""One trial: a size of micro-batches in fresh processes, and what came of it on all ranks together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from statistics import median

from lockstep.script.process import ScriptProcess
from lockstep.tune.spec import RankReport, TrialSpec

WORKER = "lockstep.tune.worker"
KILLED = re.compile(r"SIGKILL|signal 9\b")
WARM_UP = 2
"""Steps whose time is left out, where there are more."""


class SizeVerdict(str, Enum):
    """What came of a size."""

    FITS = "fits"
    OUT_OF_MEMORY = "out of memory"
    OVER_LIMIT = "over the limit"
    KILLED = "killed"
    TOO_SLOW = "no answer"
    FAILED = "failed"


@dataclass(frozen=True)
class SizeTrial:
    """What came of one size. It fits only if it fits on every rank.

    Attributes:
        micro_batch: Rows of a rank.
        accumulation: Micro-batches of a step.
        verdict: The worst of any rank.
        why: In words, for a size that does not fit.
        peak: Bytes of the rank with the most; None: not known.
        samples_per_s: Over all ranks, the median of the steps behind the first ones; None: not known.
        tokens_per_s: Likewise; None: batches have no ``input_ids``.
        steps: So many were timed.
        first_loss: Of the first step: the mean over all micro-batches of all ranks; None: not known.
        ranks: What each rank told.
    """

    micro_batch: int
    accumulation: int
    verdict: SizeVerdict
    why: str = ""
    peak: int | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    steps: int = 0
    first_loss: float | None = None
    ranks: tuple[RankReport, ...] = ()

    @property
    def fits(self) -> bool:
        """On every rank."""
        return self.verdict is SizeVerdict.FITS


@dataclass(frozen=True)
class TrialEnd:
    """How the processes of a trial have ended. ``code``: None where they took too long."""

    code: int | None
    facts: tuple[RankReport, ...]
    is_killed: bool
    ran_out_of_memory: bool
    how: str
    tail: str


def run_trial(spec: TrialSpec, words: Sequence[str], flags: Sequence[str], timeout_s: float) -> TrialEnd:
    """Run the script of ``words`` in processes of its own, with ``flags`` for `lockstep launch`."""
    folder = Path(spec.folder)
    folder.mkdir(parents=True)
    path = spec.write(folder / "spec.json")
    process = ScriptProcess(
        ScriptProcess.launched(WORKER, [str(path), *words], flags), folder / "output.txt", {}, timeout_s
    )
    try:
        code = process.wait()
    finally:
        process.end()
    failed = code not in (0, None)
    return TrialEnd(
        code=code,
        facts=tuple(RankReport.read_all(folder)),
        is_killed=failed and bool(KILLED.search(process.output())),
        ran_out_of_memory=failed and process.ran_out_of_memory(code or 0),
        how=process.how_it_failed(code) if failed and code is not None else "",
        tail=process.tail() if failed else "",
    )


def judged(
    ended: TrialEnd, micro_batch: int, accumulation: int, global_batch: int, timeout_s: float
) -> SizeTrial:
    """Return what came of a size, over all ranks."""
    facts = ended.facts
    trial = SizeTrial(
        micro_batch,
        accumulation,
        SizeVerdict.FITS,
        peak=max((one.peak for one in facts), default=None),
        ranks=facts,
    )
    verdict, why = _failure(ended, timeout_s)
    if verdict is not None:
        return replace(trial, verdict=verdict, why=why, peak=_known_peak(ended, verdict))
    samples, tokens, steps = _speed(facts, global_batch)
    return replace(
        trial, samples_per_s=samples, tokens_per_s=tokens, steps=steps, first_loss=_first_loss(facts)
    )


def _failure(ended: TrialEnd, timeout_s: float) -> tuple[SizeVerdict | None, str]:
    """Return the verdict and why, where the size does not fit; what one rank says holds for all."""
    # What ranks say of themselves comes before what exit codes and output let guess.
    for one in ended.facts:
        if one.over is not None:
            return SizeVerdict.OVER_LIMIT, f"rank {one.rank} ended itself at {one.over} of {one.limit} bytes"
    for one in ended.facts:
        if one.out_of_memory:
            return SizeVerdict.OUT_OF_MEMORY, f"rank {one.rank}: {one.failed}"
    if ended.code is None:
        return SizeVerdict.TOO_SLOW, f"ended after {timeout_s:g} s"
    for one in ended.facts:
        if one.limit is not None and one.peak > one.limit:
            return SizeVerdict.OVER_LIMIT, f"rank {one.rank} took {one.peak} of {one.limit} bytes"
    if not ended.code:
        return None, ""
    failed = next((one for one in ended.facts if one.failed), None)
    if ended.is_killed and failed is None:
        return SizeVerdict.KILLED, "a rank was ended by signal 9, as the system does when memory runs out"
    if ended.ran_out_of_memory:
        return SizeVerdict.OUT_OF_MEMORY, ended.how
    return SizeVerdict.FAILED, f"rank {failed.rank}: {failed.failed}" if failed else ended.how


def _known_peak(ended: TrialEnd, verdict: SizeVerdict) -> int | None:
    if verdict is not SizeVerdict.OVER_LIMIT:
        return None
    return max(max(one.peak, one.over or 0) for one in ended.facts)


def _speed(facts: Sequence[RankReport], global_batch: int) -> tuple[float | None, float | None, int]:
    """Return samples and tokens a second over all ranks, and the number of steps that were timed."""
    first = facts[0]
    # Whole steps behind the warm-up; the last one in any case, as there may be no others.
    whole = [
        (seconds, tokens)
        for number, (rows, seconds, tokens) in enumerate(
            zip(first.rows, first.seconds, first.tokens, strict=True)
        )
        if seconds > 0 and rows in (0, global_batch) and (number >= WARM_UP or number == len(first.rows) - 1)
    ]
    if not whole:
        return None, None, 0
    samples = median(global_batch / seconds for seconds, _ in whole)
    # Counted are the tokens of one rank, taken for those of each.
    tokens = median(count * first.data_ranks / seconds for seconds, count in whole)
    return samples, tokens or None, len(whole)


def _first_loss(facts: Sequence[RankReport]) -> float | None:
    """Return the mean over the ranks with batches of their own."""
    # Ranks that compute one batch together have one loss.
    losses = {one.data_rank: one.first_loss for one in facts}
    known = [loss for loss in losses.values() if loss is not None]
    return sum(known) / len(known) if len(known) == len(losses) and known else None
