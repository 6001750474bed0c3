"""The arithmetic of shards against list slices, brute force and Accelerate's documented cases."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lockstep.data import GlobalBatch, ShardPlan, grouped, rounds
from lockstep.errors import ConfigError
from tests.data.helpers import Numbers, Stream, consume, prepare
from tests.refusals import expect_refusal

plans = st.fixed_dictionaries(
    {
        "samples": st.integers(1, 40),
        "batch": st.integers(1, 5),
        "world": st.integers(1, 4),
        "split": st.booleans(),
        "even": st.booleans(),
        "drop": st.booleans(),
    }
)


def global_batches_of(
    samples: int, batch: int, world: int, split: bool, even: bool, drop: bool
) -> list[GlobalBatch[int]]:
    """Rounds of ``range(samples)``; ``batch`` is per rank, whether or not batches are split."""
    size = batch * world if split else batch
    plan = ShardPlan(world, size, split, even, drop)
    return list(rounds(grouped(range(samples), size, drop), plan))


def union(this: GlobalBatch[int]) -> list[int]:
    return [row for part in this.parts for row in part]


def real_rows(this: GlobalBatch[int]) -> list[int]:
    return [row for part, real in zip(this.parts, this.counts.real, strict=True) for row in part[:real]]


@settings(deadline=None)
@given(plans)
def test_every_sample_is_real_exactly_once_and_in_order(case):
    seen = [row for this in global_batches_of(**case) for row in real_rows(this)]
    total = case["batch"] * case["world"]
    expected = case["samples"] // total * total if case["drop"] else case["samples"]
    assert seen == list(range(expected))


@settings(deadline=None)
@given(plans)
def test_padding_is_the_order_from_its_beginning(case):
    global_batches = global_batches_of(**case)
    if case["world"] == 1 or not case["even"] or not global_batches:
        return
    total = case["batch"] * case["world"]
    tail = global_batches[-1].counts.total
    start = min(case["samples"], total)
    missing = -tail % case["world"] if case["split"] else total - tail
    expected = [row % start for row in range(missing)]
    assert union(global_batches[-1])[tail:] == expected


@settings(deadline=None)
@given(plans)
def test_length_is_the_number_of_batches_yielded(case):
    size = case["batch"] * case["world"] if case["split"] else case["batch"]
    plan = ShardPlan(case["world"], size, case["split"], case["even"], case["drop"])
    batches = case["samples"] // size if case["drop"] else math.ceil(case["samples"] / size)
    global_batches = global_batches_of(**case)
    for rank in range(case["world"]):
        yielded = sum(bool(this.parts[rank]) for this in global_batches)
        if not (case["drop"] and case["split"] and not case["even"]):
            assert plan.length(batches, rank, case["samples"]) == yielded


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 4), st.booleans(), st.booleans())
def test_batches_of_varying_size_are_dealt_exactly(sizes, world, split, even):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    batches = [list(range(s, s + n)) for s, n in zip(starts, sizes, strict=True)]
    global_batches = list(rounds(batches, ShardPlan(world, None, split, even)))
    assert [row for this in global_batches for row in real_rows(this)] == list(range(sum(sizes)))
    if not split:
        for rank in range(world):
            own = [this.parts[rank] for this in global_batches if this.counts.real[rank]]
            assert own == batches[rank::world]
        if even:
            assert all(all(this.parts) for this in global_batches)
    if even and split and world > 1:
        assert all(len(set(this.counts.rows)) == 1 for this in global_batches)


def test_split_batch_size_must_divide():
    expect_refusal(ConfigError, "8 or 6", ShardPlan, 2, 7, split_batches=True)


def test_ranks_get_what_accelerates_batch_sampler_shard_gave_them():
    recorded = json.loads(Path(__file__).with_name("accelerate_shards.json").read_text())["cases"]
    assert len(recorded) == 128
    for case in recorded:
        expected = case.pop("ranks")
        global_batches = global_batches_of(**case)
        own = [
            [this.parts[rank] for this in global_batches if this.parts[rank]] for rank in range(case["world"])
        ]
        # Accelerate completes the last batch of a split one to its whole size, where few rows or none are missing.
        end = -1 if case["split"] and case["even"] and case["world"] > 1 else None
        assert [rows[:end] for rows in own] == [rows[:end] for rows in expected], case


@pytest.mark.parametrize(
    ("world", "kind", "samples"),
    [(1, "map", 18), (2, "stream", 21), (2, "map", 16), (4, "map", 20), (4, "stream", 18), (4, "map", 23)],
)
def test_the_last_of_split_batches_has_its_own_rows(world: int, kind: str, samples: int) -> None:
    data = Numbers(samples) if kind == "map" else Stream(samples)
    ranks = [
        consume(prepare(DataLoader(data, batch_size=8), rank, world, split_batches=True))
        for rank in range(world)
    ]
    steps = [[row for batches in ranks for row in batches[step][0]] for step in range(len(ranks[0]))]
    plain = [batch.tolist() for batch in DataLoader(data, batch_size=8)]
    # What does not divide repeats fewer rows than there are ranks, from the beginning of the epoch.
    assert steps == [[*rows, *range(-len(rows) % world)] for rows in plain]
