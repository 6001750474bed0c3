"""What came of a trial, by what its ranks told and how its processes ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.tune import (
    MemoryWatch,
    RankReport,
    SizeVerdict,
    TrialEnd,
    judged,
    peak_of_rank,
)

CPU = torch.device("cpu")
MIB = 2**20


def ended(*facts: RankReport, code: int | None = 0, killed: bool = False, short: bool = False) -> TrialEnd:
    return TrialEnd(code, facts, killed, short, "exit code 1.", "")


def report_of(rank: int, **values: object) -> RankReport:
    steps = {"rows": [8] * 5, "batches": [2] * 5, "tokens": [0] * 5, "seconds": [9.0, 9.0, 0.5, 0.25, 0.5]}
    known = {"rank": rank, "data_rank": rank, "data_ranks": 2, "made": 5, "peak": 100, "limit": 200, **steps}
    return RankReport(**{**known, **values})


@pytest.mark.parametrize(
    ("end", "verdict", "why"),
    [
        (ended(report_of(0), report_of(1)), SizeVerdict.FITS, ""),
        (ended(report_of(0), report_of(1, peak=201)), SizeVerdict.OVER_LIMIT, "rank 1 took 201 of 200 bytes"),
        (
            ended(report_of(0), report_of(1, over=300), code=1),
            SizeVerdict.OVER_LIMIT,
            "rank 1 ended itself at 300 of 200",
        ),
        (
            ended(report_of(0), report_of(1, failed="MemoryError", out_of_memory=True), code=1),
            SizeVerdict.OUT_OF_MEMORY,
            "rank 1: MemoryError",
        ),
        (ended(report_of(0), report_of(1), code=137, killed=True), SizeVerdict.KILLED, "signal 9"),
        (ended(report_of(0), report_of(1), code=1, short=True), SizeVerdict.OUT_OF_MEMORY, "exit code 1."),
        (ended(report_of(0), code=None), SizeVerdict.TOO_SLOW, "ended after 7 s"),
        (ended(report_of(0, failed="ValueError: no"), code=1), SizeVerdict.FAILED, "rank 0: ValueError: no"),
    ],
    ids=lambda value: value.value if isinstance(value, SizeVerdict) else "",
)
def test_what_one_rank_says_holds_for_all(end: TrialEnd, verdict: SizeVerdict, why: str) -> None:
    trial = judged(end, 2, 2, 8, 7.0)
    assert trial.verdict is verdict
    assert why in trial.why
    assert trial.fits == (verdict is SizeVerdict.FITS)


def test_the_speed_is_the_median_behind_the_first_steps() -> None:
    trial = judged(ended(report_of(0, tokens=[32] * 5), report_of(1)), 2, 2, 8, 7.0)
    assert (trial.samples_per_s, trial.tokens_per_s, trial.steps) == (16.0, 2 * 32 / 0.5, 3)
    # Steps with fewer rows, and such in which something else was done, are not timed.
    trial = judged(ended(report_of(0, rows=[8, 8, 4, 8, 8], seconds=[1, 1, 1, 2.0, 0.0])), 2, 2, 8, 7.0)
    assert (trial.samples_per_s, trial.steps) == (4.0, 1)


def test_the_first_loss_is_that_of_ranks_with_batches_of_their_own() -> None:
    ranks = [
        report_of(0, first_loss=1.0),
        report_of(1, first_loss=3.0),
        report_of(2, data_rank=1, first_loss=3.0),
    ]
    assert judged(ended(*ranks), 2, 2, 8, 7.0).first_loss == 2.0
    assert judged(ended(report_of(0, first_loss=1.0), report_of(1)), 2, 2, 8, 7.0).first_loss is None


def test_the_peak_is_that_of_this_process() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # lets the peak begin anew: proc(5)
    before = peak_of_rank(CPU)
    taken = torch.ones(256 * MIB // 4)
    assert 200 * MIB < peak_of_rank(CPU) - before < 320 * MIB
    del taken


def test_a_process_is_told_of_more_than_its_limit() -> None:
    seen: list[int] = []
    watch = MemoryWatch(1, seen.append)
    watch.start()
    watch.join()
    assert len(seen) == 1 and seen[0] > 1
