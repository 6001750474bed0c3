"""What ranks have measured, put together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.verify import (
    Fault,
    ItemKind,
    RunFacts,
    TraceItem,
    judge_repeat,
    sentence,
    sentence_of_repeat,
)
from tests.verify.runs import LocalTensors, measure, ranks_of, record, shard, synthetic, verdict_of

FOUR = RunFacts(candidate="ddp", nproc=4, data_ranks=4, steps_asked=2, steps_compared=2)
GRADIENT = TraceItem(2, ItemKind.GRADIENT, "first.weight")


def test_equal_runs_agree(tmp_path: Path) -> None:
    tensors = synthetic(data_ranks=4)
    verdict = verdict_of(tmp_path, tensors, ranks_of(tensors, 4), facts=FOUR)
    assert verdict.agrees, sentence(verdict)
    assert len(verdict.ratios) == sum(verdict.compared.values()) == len(tensors) == verdict.agree_before
    assert verdict.compared[ItemKind.LOSS] == 8
    assert verdict.largest is not None and 0 < verdict.largest.ratio < 1
    assert verdict.notes == ()


@pytest.mark.parametrize("wrong", [None, 2])
def test_shards_are_put_together(wrong: int | None, tmp_path: Path) -> None:
    tensors = synthetic(data_ranks=4)
    ranks: list[LocalTensors] = []
    for rank, local in enumerate(ranks_of(tensors, 4)):
        part, shape, boxes = shard(local[GRADIENT], rank, 4)
        ranks.append({**local, GRADIENT: (part * (2 if rank == wrong else 1), shape, boxes)})
    verdict = verdict_of(tmp_path, tensors, ranks, facts=FOUR)
    assert verdict.agrees == (wrong is None)
    if wrong is not None:
        (finding,) = verdict.findings
        assert finding.ranks == (wrong,) and finding.holders == (0, 1, 2, 3)
        assert finding.factor == pytest.approx(2, rel=1e-4)
        rows = tensors[GRADIENT][4:6]
        assert finding.distance == pytest.approx(float(rows.norm() / tensors[GRADIENT].norm()), rel=1e-4)


def test_one_wrong_copy_among_many_is_found(tmp_path: Path) -> None:
    tensors = synthetic(data_ranks=4)
    ranks = ranks_of(tensors, 4)
    ranks[3][GRADIENT] = ranks[3][GRADIENT] * 1.01
    verdict = verdict_of(tmp_path, tensors, ranks, facts=FOUR)
    (finding,) = verdict.findings
    assert finding.ranks == (3,) and finding.distance == pytest.approx(0.01, rel=1e-2)


def test_findings_are_in_the_order_of_a_step(tmp_path: Path) -> None:
    tensors = synthetic(data_ranks=4)
    ranks = ranks_of(tensors, 4)
    wrong = [
        TraceItem(1, ItemKind.OUTPUT, "second", data_rank=1),
        TraceItem(1, ItemKind.LOSS, "", data_rank=1),
        TraceItem(1, ItemKind.OUTPUT_GRADIENT, "first", data_rank=0),
        TraceItem(1, ItemKind.GRADIENT, "second.bias"),
        TraceItem(1, ItemKind.UPDATE, "first.weight"),
        TraceItem(2, ItemKind.BATCH, "", data_rank=3, path="x"),
    ]
    for local in ranks:
        for item in wrong:
            if item in local:
                local[item] = local[item] * 3
    verdict = verdict_of(tmp_path, tensors, ranks, facts=FOUR)
    found = [finding.item for finding in verdict.findings]
    assert {*found} == {*wrong} and found[-3:] == wrong[-3:]
    assert [item.kind for item in found[:3]] in (
        [ItemKind.OUTPUT, ItemKind.LOSS, ItemKind.OUTPUT_GRADIENT],
        [ItemKind.OUTPUT_GRADIENT, ItemKind.OUTPUT, ItemKind.LOSS],
    )


@pytest.mark.parametrize(
    ("lost", "faults"),
    [
        (lambda item: item == GRADIENT, {Fault.MISSING}),
        (lambda item: item.kind is ItemKind.OUTPUT and item.name == "first", set()),
        (lambda item: item.kind is ItemKind.NORM, set()),
        (lambda item: item.step == 2, {Fault.STEP}),
    ],
)
def test_what_no_rank_has(lost, faults: set[Fault], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tensors = synthetic()
    ranks = [{item: one for item, one in local.items() if not lost(item)} for local in ranks_of(tensors, 2)]
    verdict = verdict_of(tmp_path, tensors, ranks)
    assert {finding.fault for finding in verdict.findings} == faults
    assert len(verdict.findings) == len(faults)
    assert bool(verdict.notes) != bool(faults)


def test_what_the_reference_has_not(tmp_path: Path) -> None:
    tensors = synthetic()
    ranks = ranks_of(tensors, 2)
    extra, third = (
        TraceItem(1, ItemKind.GRADIENT, "third.weight"),
        TraceItem(3, ItemKind.LOSS, "", data_rank=0),
    )
    ranks[1][extra] = torch.ones(3)
    ranks[0][third] = torch.ones(())
    verdict = verdict_of(tmp_path, tensors, ranks)
    assert [(one.item, one.fault) for one in verdict.findings] == [
        (extra, Fault.ADDED),
        (TraceItem(3, ItemKind.BATCH, ""), Fault.STEP),
    ]


def test_another_shape(tmp_path: Path) -> None:
    tensors = synthetic()
    ranks = ranks_of(tensors, 2)
    ranks[1][GRADIENT] = torch.ones(8, 9)
    (finding,) = verdict_of(tmp_path, tensors, ranks).findings
    assert finding.fault is Fault.SHAPE and finding.ranks == (1,) and finding.shapes == ((8, 9), (8, 8))


def test_two_runs_of_the_reference_must_be_equal(tmp_path: Path) -> None:
    tensors = synthetic()
    trace = record(tmp_path / "reference.safetensors", tensors)
    lines, _ = measure(trace, tmp_path / "again", [tensors])
    assert judge_repeat(trace, lines, RunFacts()).agrees
    other = {**tensors, TraceItem(1, ItemKind.OUTPUT, "second", data_rank=0): tensors[GRADIENT][:4] + 1e-7}
    lines, _ = measure(trace, tmp_path / "other", [other])
    verdict = judge_repeat(trace, lines, RunFacts(data_ranks=2))
    assert sentence_of_repeat(verdict).startswith(
        "Two reference runs already differ at step 1, forward: the output of `second` (data rank 0) is off by"
    )
