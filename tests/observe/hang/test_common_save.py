"""A save that somebody has asked for: all ranks at one boundary, or none."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.observe.hang import ANSWER_LIMIT_S, UNDER_WAY, StopGate
from lockstep.runtime import StepClock
from tests.marks import examples
from tests.observe.hang.test_coordinator import Run
from tests.observe.hang.test_gate import Barrier, rank, stop

CAUSE = "a request"


def asked(run: Run) -> list[int]:
    """The numbers of the saves that rank 0 was asked for."""
    return [message["number"] for message in run.peers[0].sent if message["kind"] == "watch.save"]


def answer(run: Run, *boundaries: int) -> None:
    for peer, boundary in zip(run.peers, boundaries, strict=False):
        run.tell(peer, "may_save", number=asked(run)[-1], boundary=boundary, steps=boundary)


@pytest.fixture
def run() -> Run:
    found = Run()
    found.sentences: list[str] = []  # type: ignore[attr-defined]
    found.coordinator.at_save = found.sentences.append  # type: ignore[attr-defined]
    found.heartbeats(1, boundaries=3)
    return found


def test_all_save_at_the_first_boundary_that_none_has_passed_and_the_last_one_ends_it(run: Run) -> None:
    assert run.coordinator.request_save(CAUSE) == ""
    answer(run, 4, 6)
    assert "save_at" not in run.peers[0].verbs()
    answer(run, 4, 6, 5)
    assert [peer.sent[-1] for peer in run.peers] == 3 * [{"kind": "watch.save_at", "boundary": 7}]
    assert run.coordinator.request_save(CAUSE) == UNDER_WAY
    for peer in run.peers:
        assert run.sentences == []  # type: ignore[attr-defined]
        run.tell(peer, "saved", sentence=f"told by rank {peer.data['rank']}")
    assert run.sentences == ["told by rank 0"]  # type: ignore[attr-defined]
    assert run.coordinator.request_save(CAUSE) == "" and len(asked(run)) == 2


@pytest.mark.parametrize("why", ["stop", "gone", "ended", "silence"])
def test_before_a_boundary_is_named_it_can_be_withdrawn(why: str, run: Run) -> None:
    run.coordinator.request_save(CAUSE)
    answer(run, 4, 4)
    if why == "stop":
        run.coordinator.request_stop("SIGTERM")
    elif why == "gone":
        run.coordinator.lost(run.peers[2])  # type: ignore[arg-type]
    elif why == "ended":
        run.tell(run.peers[2], "bye", failed=False)
    run.coordinator.tick(run.now + (ANSWER_LIMIT_S + 1 if why == "silence" else 0.2))
    assert "no_save" in run.peers[0].verbs() and "save_at" not in run.peers[0].verbs()
    reason = {
        "stop": "the run is about to stop", "gone": "a rank has ended meanwhile", "ended": "a rank has ended meanwhile",
        "silence": "rank 2 does not answer",
    }[why]  # fmt: skip
    assert run.sentences == [f"Nothing was saved: {reason}."]  # type: ignore[attr-defined]
    answer(run, 4, 4, 4)  # too late
    assert "save_at" not in run.peers[0].verbs()


def test_after_a_boundary_is_named_nothing_takes_it_back(run: Run) -> None:
    run.coordinator.request_save(CAUSE)
    answer(run, 4, 4, 4)
    run.coordinator.request_stop("SIGTERM")
    run.coordinator.tick(run.now + 2 * ANSWER_LIMIT_S)
    assert "no_save" not in run.peers[0].verbs()
    run.coordinator.lost(run.peers[1])  # type: ignore[arg-type]
    run.coordinator.tick(run.now + 2 * ANSWER_LIMIT_S)
    assert run.sentences == ["A rank has ended before the save was complete."]  # type: ignore[attr-defined]


def test_it_is_refused_where_there_is_nothing_to_save_or_not_all_are_there() -> None:
    early = Run()
    assert "no rank has made a step yet" in early.coordinator.request_save(CAUSE)
    early.heartbeats(1, boundaries=2)
    early.tell(early.peers[1], "bye", failed=False)
    assert early.coordinator.request_save(CAUSE) == "only 2 of 3 ranks are in training"
    stopping = Run()
    stopping.heartbeats(1, boundaries=2)
    stopping.coordinator.request_stop("SIGTERM")
    assert "about to stop" in stopping.coordinator.request_save(CAUSE)


@examples(20)
@given(world_size=st.integers(2, 4), seed=st.integers(0, 10**6))
def test_ranks_that_wait_for_each_other_save_at_one_boundary_and_then_stop_at_one(
    world_size: int, seed: int
) -> None:
    """The requests reach the ranks one by one, at random moments of their training; every second save is withdrawn."""
    order = random.Random(seed)
    barrier, meeting = Barrier(world_size), Barrier(world_size)
    clocks = [StepClock() for _ in range(world_size)]
    saved: list[list[int]] = [[] for _ in clocks]
    stopped_at: list[int] = []

    def save(number: int) -> None:
        meeting.wait(10)  # a save is collective
        saved[number].append(clocks[number].boundaries)

    gates = [
        StopGate(clock, stop, save=lambda cause, number=number: save(number))  # type: ignore[misc]
        for number, clock in enumerate(clocks)
    ]
    threads = [
        threading.Thread(target=rank, args=(clock, lambda: barrier.wait(10), 10**7, stopped_at))
        for clock in clocks
    ]
    for thread in threads:
        thread.start()

    def to_each(tell: object) -> list[int]:
        found = []
        for number in order.sample(range(world_size), world_size):
            found.append(tell(gates[number]))  # type: ignore[operator]
            threading.Event().wait(order.random() * 0.002)
        return found

    while clocks[0].boundaries < 3:
        pass
    targets = []
    for attempt in range(3):
        passed = to_each(lambda gate: gate.close_to_save(CAUSE))
        if attempt == 1:
            to_each(lambda gate: gate.save_at(None))
            continue
        targets.append(1 + max(passed))
        to_each(lambda gate: gate.save_at(targets[-1]))
        while any(len(own) < len(targets) for own in saved):
            assert all(thread.is_alive() for thread in threads)
    passed = to_each(lambda gate: gate.close("SIGTERM"))
    to_each(lambda gate: gate.aim(1 + max(passed)))
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert saved == [targets] * world_size
    assert stopped_at == [1 + max(passed)] * world_size


def test_a_rank_that_was_not_answered_in_time_does_not_save_later() -> None:
    clock, saved = StepClock(), []
    gate = StopGate(clock, stop, limit_s=0.01, save=saved.append)
    gate.close_to_save(CAUSE)
    clock.boundary()
    gate.save_at(1)
    clock.boundary()
    assert saved == [] and clock.boundaries == 2
