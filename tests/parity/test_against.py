"""Traces that were kept and are no reference for a candidate: of other ranks, in another precision, without dropout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.parity import CouldNotRun, ProcessFacts, refuse_other_run

PATH = Path("kept.trace")
KEPT = ProcessFacts(data_ranks=2, parallel="ddp")


def test_one_like_the_candidate_is_compared_with() -> None:
    refuse_other_run(KEPT, replace(KEPT, parallel="zero=3", rank=1, data_rank=1), PATH, 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data_ranks": 4}, "recorded for 2 ranks with batches of their own, but the candidate has 4"),
        (
            {"mixed_precision": "bf16"},
            "made for mixed_precision='no', but the candidate computes with 'bf16'",
        ),
        ({"drops_out": False, "parallel": "tp=2"}, "recorded with dropout on, but with tp=2 it is off"),
    ],
    ids=str,
)
def test_others_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(CouldNotRun) as raised:
        refuse_other_run(KEPT, replace(KEPT, **changes), PATH, 2)  # type: ignore[arg-type]
    assert said in str(raised.value)
