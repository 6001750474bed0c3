"""The answer in a sentence, as a table, as JSON and as a page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from lockstep.cli import page_of_verdict
from lockstep.verify import (
    TITLES,
    Fault,
    ItemKind,
    Mismatch,
    ParityVerdict,
    Ratio,
    RunFacts,
    TraceItem,
    distances,
    named,
    remarks,
    rows,
    sentence,
    to_json,
)
from lockstep.words import count, indices, listed, of_ranks, two_digits
from tests.verify.runs import ranks_of, synthetic, verdict_of

FOUR = RunFacts(candidate="zero=3 tp=2", nproc=4, data_ranks=4, steps_asked=3, steps_compared=3)
O_PROJ = TraceItem(1, ItemKind.GRADIENT, "blocks.3.attn.o_proj.weight")
SUMMED = Mismatch(
    O_PROJ,
    Fault.DIFFERS,
    (2, 3),
    (0, 1, 2, 3),
    distance=1.0,
    spread=3e-7,
    allowed=3e-6,
    factor=2.0,
    looks_like="It looks as if it was averaged over 2 of 4 ranks.",
)


def verdict(
    *findings: Mismatch, ratios: tuple[Ratio, ...] = (), before: int = 5, facts: RunFacts = FOUR
) -> ParityVerdict:
    return ParityVerdict(facts, 10, ratios, findings, before)


def test_the_sentence_of_a_difference() -> None:
    assert sentence(verdict(SUMMED)) == (
        "step 1, backward: the gradient of `blocks.3.attn.o_proj.weight` on ranks 2 and 3 is 2.00 times the reference "
        "(rounding explains 3e-7). Everything before it agrees. It looks as if it was averaged over 2 of 4 ranks."
    )


def test_the_sentence_of_agreement() -> None:
    ratios = tuple(
        Ratio(TraceItem(1 + n % 3, ItemKind.OUTPUT, f"m{n}", data_rank=0), n / 6000, 1e-7)
        for n in range(1234)
    )
    assert sentence(verdict(ratios=ratios)) == (
        "OK: 4 ranks with zero=3 tp=2 match one process: 1,234 tensors of 3 steps agree. The largest difference "
        "(step 1, forward: the output of `m1233` (data rank 0)) is 21% of the tolerance."
    )
    one = RunFacts(nproc=1, reference="ddp", steps_compared=1)
    assert sentence(verdict(ratios=(Ratio(O_PROJ, 0, 0),), facts=one)) == (
        "OK: 1 rank matches 1 rank with ddp: 1 tensor of 1 step agrees bit for bit."
    )
    assert sentence(verdict()) == "Nothing was compared: the two runs have no tensor in common."


@pytest.mark.parametrize(
    ("finding", "said"),
    [
        (
            Mismatch(
                TraceItem(2, ItemKind.NORM, ""),
                Fault.DIFFERS,
                (0,),
                (0,),
                1.9,
                1e-6,
                1e-5,
                None,
                None,
                (4.74, 1.63),
            ),
            "step 2, clipping: the gradient norm is 4.74 in place of 1.63 (rounding explains 1e-6).",
        ),
        (
            Mismatch(
                TraceItem(1, ItemKind.RATE, ""), Fault.DIFFERS, (0,), (0,), 1.0, 0, 0, 2.0, None, (2e-3, 1e-3)
            ),
            "step 1, optimizer: the learning rate is 2.00 times the reference (0.002 in place of 0.001).",
        ),
        (
            Mismatch(O_PROJ, Fault.DIFFERS, (1,), (0, 1), 0.25, 1e-3, 4e-3),
            "step 1, backward: the gradient of `blocks.3.attn.o_proj.weight` on rank 1 is off by 0.25 of its norm "
            "(rounding explains 0.001).",
        ),
        (
            Mismatch(O_PROJ, Fault.DIFFERS, (0,), (0,), 1.0, 1e-3, 4e-3, 0.0),
            "step 1, backward: the gradient of `blocks.3.attn.o_proj.weight` is zero (rounding explains 0.001).",
        ),
        (
            Mismatch(TraceItem(1, ItemKind.BATCH, "", data_rank=2, path="x"), Fault.DIFFERS, (2,), (2,)),
            "step 1, data: the batch[x] (data rank 2) has other rows.",
        ),
        (
            Mismatch(O_PROJ, Fault.MISSING),
            "step 1, backward: no rank has the gradient of `blocks.3.attn.o_proj.weight`.",
        ),
        (
            Mismatch(O_PROJ, Fault.ADDED, (0, 1), (0, 1)),
            "step 1, backward: the reference has nothing like the gradient of `blocks.3.attn.o_proj.weight` on ranks 0 "
            "and 1.",
        ),
        (
            Mismatch(O_PROJ, Fault.SHAPE, (0,), (0,), shapes=((2, 3), (3, 2))),
            "step 1, backward: the gradient of `blocks.3.attn.o_proj.weight` has the shape [2, 3] in place of [3, 2].",
        ),
        (
            Mismatch(TraceItem(3, ItemKind.BATCH, ""), Fault.STEP, distance=0),
            "step 3: only the candidate made this step.",
        ),
        (
            Mismatch(TraceItem(0, ItemKind.WEIGHT, "a.b"), Fault.DIFFERS, (3,), (0, 3), 2.0, 1e-7, 1e-6),
            "before the first step: the initial weight `a.b` on rank 3 is off by 2 of its norm (rounding explains "
            "1e-7).",
        ),
    ],
)
def test_each_fault_has_its_sentence(finding: Mismatch, said: str) -> None:
    assert sentence(verdict(finding, before=0)) == f"{said} Nothing was compared before it."
    others = sentence(verdict(finding, SUMMED, SUMMED))
    assert others.endswith("2 more tensors differ.")
    assert all(len(row) == len(TITLES) for row in rows(verdict(finding)))


def test_micro_batches_are_named_where_there_are_several() -> None:
    item = TraceItem(1, ItemKind.OUTPUT, "m", 2, 1, 1)
    assert named(item, RunFacts(data_ranks=2, accumulation_steps=4)) == (
        "the output of `m` (call 2, micro-batch 2, data rank 1)"
    )
    assert named(item._replace(call=0), RunFacts()) == "the output of `m`"


def test_remarks_say_the_multiple_and_what_was_not_compared() -> None:
    facts = RunFacts(nproc=2, steps_asked=3, steps_compared=1, notes=("Dropout was off in both runs.",))
    assert remarks(verdict(facts=facts)) == [
        "Tolerance: 10 times the measured rounding error of each tensor (10 * (1 + 9/n) times if it has n elements).",
        "1 step of 3 could be compared.",
        "Dropout was off in both runs.",
    ]


def test_remarks_on_half_precision_name_kinks() -> None:
    assert "In bf16, up to 32 elements" in remarks(verdict(facts=RunFacts(dtype="bf16")))[1]


def test_the_json_has_stable_keys(tmp_path: Path) -> None:
    tensors = synthetic()
    ranks = ranks_of(tensors, 2)
    ranks[0][O_PROJ._replace(name="first.weight")] *= torch.nan
    said = json.loads(json.dumps(to_json(verdict_of(tmp_path, tensors, ranks)), allow_nan=False))
    assert list(said) == [
        "format", "agrees", "sentence", "multiple", "compared", "agree_before", "largest", "findings", "notes", "run",
    ]  # fmt: skip
    (finding,) = said["findings"]
    assert list(finding) == [
        "step", "kind", "name", "micro_batch", "data_rank", "call", "path", "phase", "fault", "ranks", "holders",
        "distance", "rounding_explains", "allowed", "factor", "numbers", "shapes", "looks_like",
    ]  # fmt: skip
    assert finding["distance"] is None and finding["ranks"] == [0] and not said["agrees"]
    assert all(f"``{key}``" in (to_json.__doc__ or "") for key in finding)


def test_the_page_has_the_answer_and_loads_nothing() -> None:
    name = '<script>alert("1")</script>\x1b[31m'
    finding = Mismatch(TraceItem(1, ItemKind.GRADIENT, f"{name}.weight"), Fault.DIFFERS, (0,), (0,))
    ratios = (Ratio(finding.item, 7.0, 1e-6), Ratio(TraceItem(2, ItemKind.OUTPUT, name), 0.5, 1e-7))
    found = verdict(finding, ratios=ratios)
    assert distances(found) == (["step 1", "step 2"], [("backward", "7", ""), ("forward", "", "0.5")])
    page = page_of_verdict(found)
    assert "Numbers differ" in page and "step 1, backward: the gradient of" in page
    assert not re.search(r"https?:|url\(|@import|<link|<img", page)
    assert "<script>alert" not in page and "\x1b" not in page and "&lt;script&gt;" in page


def test_words() -> None:
    assert (count(1, "tensor"), count(1234, "tensor"), count(2, "batch", "batches")) == (
        "1 tensor", "1,234 tensors", "2 batches",
    )  # fmt: skip
    assert (listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"], "or")) == ("a", "a and b", "a, b or c")
    assert (of_ranks([3]), of_ranks([3, 2]), of_ranks(range(6))) == (
        "rank 3",
        "ranks 2 and 3",
        "ranks 0 to 5",
    )
    assert indices([0, 1, 2, 3, 7]) == "0 to 3 and 7"
    assert indices(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12 and 13 more"
    assert [two_digits(one) for one in (3e-7, 0.214, 12.0, 0.0, 1e-12, 1e30)] == [
        "3e-7",
        "0.21",
        "12",
        "0",
        "1e-12",
        "1e30",
    ]
