"""Rounds that are cut out of the samples directly are those that the dealing of whole batches gives."""

from __future__ import annotations

from collections import deque
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from lockstep.data import CutSamples, Dealing, Drawing, DrawnOrder, Generators, ShardPlan

ReadBatches = list[tuple[object, tuple[object, ...]]]


def read_batches(
    plan: ShardPlan, samples: int, behind: int, left_out: int, known: int | None, cut: bool
) -> ReadBatches:
    """Each batch of all ranks with the round that was announced for it.

    ``known``: what the sampler says its length is. With ``cut``, samples are given instead of batches.
    """
    assert plan.batch_size is not None
    ranks = range(plan.world_size)
    announced: deque[tuple[object, ...]] = deque()
    order = None
    if known is not None:
        sampler = BatchSampler(SequentialSampler(range(known)), plan.batch_size, plan.drop_last)
        generators = Generators()
        order = DrawnOrder(sampler, False, Drawing(generators, generators.read()))
    first = [
        list(range(n, n + plan.batch_size))
        for n in range(0, plan.beginning * plan.batch_size, plan.batch_size)
    ]
    later = CutSamples(iter(range(behind, samples)), plan.batch_size, plan.drop_last)
    dealing = Dealing(
        plan, ranks, order, False, announced, lambda *all_of_it: all_of_it, behind, left_out
    )  # fmt: skip
    found: ReadBatches = []
    for batch in dealing.batches(later if cut else iter(later), first):
        found.append((batch, announced[-1]))
        assert len(announced) <= len(found)
    return found


@given(
    world=st.integers(1, 4),
    size=st.sampled_from([1, 2, 4, 12]),
    samples=st.integers(0, 60),
    behind=st.integers(0, 20),
    left_out=st.integers(0, 4),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    said=st.sampled_from([None, -7, -1, 0, 1, 7]),
)
def test_both_ways_of_dealing_agree(world, size, samples, behind, left_out, flags, said) -> None:
    """Also where a sampler has not the length that it says."""
    split, even, drop_last = flags
    size *= world if split else 1
    plan = ShardPlan(world, size, split, even, drop_last)
    known = None if said is None or world > 1 else max(0, samples + said)
    arguments = plan, samples, min(behind, samples), left_out, known
    assert read_batches(*arguments, cut=True) == read_batches(*arguments, cut=False)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_one_round_at_most_is_read_ahead(world: int) -> None:
    """What is drawn too early would be drawn in another order than without Lockstep."""
    for length, looks_ahead in product((None, 12 * world), (True, False)):
        if looks_ahead == (world == 1 and length is not None):
            continue
        asked: list[int] = []
        samples = (asked.append(n) or n for n in range(12 * world))  # type: ignore[func-returns-value]
        order = None
        if not looks_ahead:
            generators = Generators()
            sampler = BatchSampler(SequentialSampler(range(12)), 2, False)
            order = DrawnOrder(sampler, False, Drawing(generators, generators.read()))
        plan = ShardPlan(world, 2)
        dealing = Dealing(plan, (0,), order, False, deque(), None, 0, 0)
        for number, _ in enumerate(dealing.batches(CutSamples(samples, 2, False), []), 1):
            assert len(asked) == min(12 * world, 2 * world * (number + looks_ahead))
        assert len(asked) == 12 * world
