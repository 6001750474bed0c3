"""The clock of a pipeline: timelines worked out by hand, and what holds for any of them."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lockstep.errors import ConfigError, UsageError
from lockstep.plan import Action, Timeline, Times, action_lists, by_rank, checked, parse_times, simulate
from tests.marks import examples
from tests.refusals import expect_refusal

NAMES = ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]


def spans(timeline: Timeline) -> list[list[tuple[str, float, float]]]:
    return [[(f"{a.stage}{a.kind}{a.micro_batch}", s, e) for a, s, e in rank] for rank in timeline.ranks]


def order(rank: int, text: str) -> list[Action]:
    """``0F1 0B1``: of stage 0, micro-batch 1."""
    return [Action(rank, int(word[0]), word[1], int(word[2:])) for word in text.split()]


def test_a_timeline_worked_out_by_hand() -> None:
    timeline = simulate([order(0, "0F0 0F1 0B0 0B1"), order(1, "1F0 1B0 1F1 1B1")])
    assert spans(timeline) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)],
        [("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7)],
    ]
    assert timeline.makespan == 9
    assert [timeline.idle(rank) for rank in (0, 1)] == [3, 3]
    assert [timeline.waits(rank) for rank in (0, 1)] == [3, 0]
    assert timeline.bubble == 6 / 18
    assert timeline.inner_bubble == 3 / 15
    assert [timeline.in_flight(rank) for rank in (0, 1)] == [2, 1]


def test_split_backward_lets_the_rank_before_go_on_earlier() -> None:
    timeline = simulate([order(0, "0F0 0I0 0W0"), order(1, "1F0 1I0 1W0")], Times(1, 2, 3))
    assert spans(timeline) == [
        [("0F0", 0, 1), ("0I0", 4, 6), ("0W0", 6, 9)],
        [("1F0", 1, 2), ("1I0", 2, 4), ("1W0", 4, 7)],
    ]
    assert timeline.in_flight(0) == 1


def test_what_a_pair_gives_leaves_when_both_are_done() -> None:
    first, second = order(0, "0F0 0F1")
    late = simulate([[first._replace(paired=True), second], order(1, "1F0 1F1")])
    assert spans(late)[1] == [("1F0", 2, 3), ("1F1", 3, 4)]
    assert spans(simulate([[first, second], order(1, "1F0 1F1")]))[1] == [("1F0", 1, 2), ("1F1", 2, 3)]
    both = simulate([[first._replace(paired=True), *order(0, "1F0")]])  # its own rank has it at once
    assert spans(both)[0] == [("0F0", 0, 1), ("1F0", 1, 2)]
    last = simulate([[first._replace(paired=True)], order(1, "1F0")])  # with nothing to wait for
    assert spans(last)[1] == [("1F0", 1, 2)]


def test_records_of_a_run_are_sorted_by_rank_and_keep_their_order() -> None:
    records = [(1, 1, "F", 0), (0, 0, "F", 0), (1, 1, "B", 0), (0, 0, "B", 0)]
    assert by_rank(records) == [order(0, "0F0 0B0"), order(1, "1F0 1B0")]
    assert simulate(by_rank(records)).makespan == 6
    assert by_rank([]) == []
    assert simulate([]).bubble == 0


@pytest.mark.parametrize(
    "record", [(0, 0, "X", 0), (0, 0, "F"), (-1, 0, "F", 0), (0, "a", "F", 0), (0, 0, 1, 0)]
)
def test_a_record_of_another_form_is_refused(record: tuple[int | str, ...]) -> None:
    with pytest.raises(UsageError):
        by_rank([record])


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ([order(0, "0F0 0F0")], "micro-batch 0 on stage 0 (rank 0)"),
        ([order(0, "0F0 0B0 0W0")], "Backward of the weights"),
        ([order(0, "0F0"), order(1, "0B0")], "stage 0 belongs to rank 0"),
        ([order(1, "0F0")], "in the list of rank 0"),
        ([order(0, "0B0 0F0")], "waits for forward on stage 0"),
        ([order(0, "0F0 0B0"), order(1, "1F0")], "backward of the input on stage 1"),
        ([order(0, "0F0"), order(1, "1F1")], "micro-batch 1 on stage 1"),
    ],
)
def test_orders_that_cannot_run_are_refused(orders: list[list[Action]], message: str) -> None:
    expect_refusal(UsageError, message, simulate, orders)


def test_times_of_forward_and_backward_or_of_its_parts() -> None:
    assert parse_times("1,2") == Times(1, 1, 1)
    assert parse_times(" 2, 3 ") == Times(2, 1.5, 1.5)
    assert parse_times("1,1.2,0.8") == Times(1, 1.2, 0.8)
    assert parse_times("1,1.5,0.5").duration("B") == 2
    for text in ("1", "1,2,3,4", "a,b", "1,-2", "0,1", "nan,1", "inf,1", "1e9,1", "", "1,,2"):
        with pytest.raises(ConfigError):
            parse_times(text)


@examples(40)
@given(
    st.sampled_from(NAMES),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(0, 3),
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
)
def test_any_schedule_of_torch_runs_each_part_once_in_an_order_that_works(
    name: str, ranks: int, batches: int, stages: int, times: tuple[int, int, int]
) -> None:
    try:
        _, stages = checked(name, ranks, batches, stages)
    except ConfigError:
        assume(False)
    forward, of_input, of_weights = times
    timeline = simulate(action_lists(name, ranks, batches, stages), Times(*times))

    length = {"F": forward, "I": of_input, "W": of_weights, "B": of_input + of_weights}
    end: dict[tuple[int, str, int], float] = {}
    start: dict[tuple[int, str, int], float] = {}
    for rank, line in enumerate(timeline.ranks):
        assert all(before.end <= after.start for before, after in itertools.pairwise(line))
        for action, begin, finish in line:
            assert action.rank == rank
            assert finish - begin == length[action.kind]
            for kind in "IW" if action.kind == "B" else action.kind:
                assert (action.stage, kind, action.micro_batch) not in end
                end[action.stage, kind, action.micro_batch] = finish
                start[action.stage, kind, action.micro_batch] = begin
    everything = {(s, kind, m) for s in range(ranks * stages) for kind in "FIW" for m in range(batches)}
    assert set(end) == everything
    for stage, kind, batch in everything:
        begin = start[stage, kind, batch]
        if kind == "F" and stage:
            assert begin >= end[stage - 1, "F", batch]
        if kind == "I":
            assert begin >= end[stage, "F", batch]
            assert stage == ranks * stages - 1 or begin >= end[stage + 1, "I", batch]
        if kind == "W":
            assert begin >= start[stage, "I", batch]
    useful = ranks * stages * batches * sum(times)
    assert timeline.bubble == pytest.approx(float(1 - Fraction(useful) / Fraction(ranks * timeline.makespan)))
    assert 0 <= timeline.inner_bubble <= timeline.bubble < 1
    assert all(1 <= timeline.in_flight(rank) <= stages * batches for rank in range(ranks))
