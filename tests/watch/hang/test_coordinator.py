"""The coordinator alone: messages and times are invented, nothing sleeps."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from typing import Any

import pytest

from lockstep.watch.hang.coordinator import Coordinator, WatchSettings
from lockstep.watch.hang.evidence import Collective, Evidence, Place


@dataclass
class FakePeer:
    data: dict[str, Any] = field(default_factory=dict)
    sent: list[dict[str, Any]] = field(default_factory=list)

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(dict(message))

    def verbs(self) -> list[str]:
        return [message["kind"].split(".")[1] for message in self.sent]


class Run:
    """Ranks that tell a coordinator what a test says, and a clock that a test moves."""

    def __init__(self, world_size: int = 3, **settings: float) -> None:
        self.said: list[str] = []
        self.coordinator = Coordinator(WatchSettings(**settings), self.said.append)
        self.coordinator.start_round(world_size)
        self.now = 100.0
        self.coordinator.tick(self.now)
        self.peers = [FakePeer() for _ in range(world_size)]
        for rank, peer in enumerate(self.peers):
            self.tell(peer, "hello", rank=rank, world_size=world_size, host=platform.node(), pid=os.getpid())

    def tell(self, peer: FakePeer, verb: str, **values: Any) -> None:
        self.coordinator.received(peer, {"kind": f"watch.{verb}", **values})

    def beats(
        self, ticks: int, boundaries: int = 1, slowest_s: float = 0.1, but: tuple[int, ...] = ()
    ) -> None:
        for rank, peer in enumerate(self.peers):
            if rank not in but:
                self.tell(peer, "beat", ticks=ticks, boundaries=boundaries, slowest_s=slowest_s)

    def wait(self, seconds: float, ticks: int = 1, but: tuple[int, ...] = (), **beat: Any) -> None:
        """Time passes in ticks of 0.2 s, with beats that tell of no progress; questions are answered by ``answer``."""
        for _ in range(round(seconds / 0.2)):
            self.now += 0.2
            self.beats(ticks, but=but, **beat)
            self.coordinator.tick(self.now)
            for rank, peer in enumerate(self.peers):
                for message in peer.sent:
                    if message["kind"] == "watch.explain" and not message.get("answered") and rank not in but:
                        message["answered"] = True
                        self.tell(peer, "evidence", question=message["question"], evidence=self.answer(rank))

    def answer(self, rank: int) -> dict[str, Any]:
        here = Place("train.py", 57, "main") if rank != 1 else Place("data.py", 88, "slow_fetch")
        pending = (Collective("all_reduce", 412, "default", "[4]", "float32", here),) if rank != 1 else ()
        return Evidence(
            rank, platform.node(), os.getpid(), 3, 5.0, here, pending, {"default": 411}, ""
        ).to_message()


def test_a_hang_is_named_once_and_in_time() -> None:
    run = Run()
    run.wait(4.8)
    assert len(run.said) == 1
    assert "rank 1" in run.said[0].lower()
    assert "all_reduce #412" in run.said[0]
    assert "train.py:57" in run.said[0]
    assert "data.py:88" in run.said[0]
    assert "slow_fetch" in run.said[0]
    run.wait(60)
    assert len(run.said) == 1
    assert run.coordinator.verdict is None


def test_slow_steps_are_usual_where_they_are_slow() -> None:
    run = Run()
    run.wait(9.0, slowest_s=3.0)  # five of them are 15 s
    assert run.said == []
    run.wait(5.9, slowest_s=3.0)
    assert len(run.said) == 1


def test_progress_of_any_rank_is_progress() -> None:
    run = Run()
    for ticks in range(1, 40):
        run.tell(run.peers[ticks % 3], "beat", ticks=ticks, boundaries=1)
        run.wait(1.0, ticks=ticks, but=(0, 1, 2))
    assert run.said == []


def test_after_a_hang_the_ranks_may_go_on() -> None:
    run = Run(hang_timeout_s=20.0)
    run.wait(10.0)
    run.wait(2.0, ticks=2)
    assert "went on after 10 s" in run.said[-1]
    for ticks in range(3, 30):
        run.wait(1.0, ticks=ticks)
    assert run.coordinator.verdict is None
    run.wait(6.0, ticks=30)
    assert len(run.said) == 3  # a second hang is named again


def test_a_hang_that_lasts_too_long_gets_a_verdict() -> None:
    run = Run(hang_timeout_s=20.0)
    run.wait(19.0)
    assert run.coordinator.verdict is None
    run.wait(1.6)
    verdict = run.coordinator.verdict
    assert verdict is not None
    assert verdict.ranks == (1,)
    run.coordinator.start_round(3)
    assert run.coordinator.verdict is None


def test_a_rank_that_does_not_answer_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.watch.hang.coordinator.state_of", lambda pid: "stopped")
    run = Run()
    run.answer = lambda rank: Evidence(  # type: ignore[method-assign]
        rank,
        platform.node(),
        1,
        3,
        5.0,
        None,
        (Collective("all_reduce", 4, "default", "[4]", "float32", None),),
        {},
        "",
    ).to_message()
    run.wait(4.8, but=(1,))
    assert len(run.said) == 1
    assert "rank 1" in run.said[0].lower()
    assert "stopped" in run.said[0].lower()


def test_when_nobody_waits_for_another_nothing_is_said_for_long() -> None:
    """All ranks compute: mostly an evaluation without prepared loaders, or a long save."""
    run = Run()
    run.answer = lambda rank: Evidence(  # type: ignore[method-assign]
        rank, platform.node(), 1, 3, 5.0, Place("train.py", 90, "evaluate"), (), {}, ""
    ).to_message()
    run.wait(55)
    assert run.said == []
    run.wait(15)
    assert len(run.said) == 1


def test_the_target_of_a_stop_is_the_first_boundary_that_no_rank_passed() -> None:
    run = Run()
    run.beats(5, boundaries=7)
    assert run.coordinator.request_stop("SIGTERM")
    for peer in run.peers:
        assert peer.sent[-1] == {"kind": "watch.stop", "cause": "SIGTERM"}
    run.tell(run.peers[0], "passed", boundary=7)
    run.tell(run.peers[2], "passed", boundary=8)
    assert "target" not in run.peers[0].verbs()
    run.tell(run.peers[1], "passed", boundary=7)
    for peer in run.peers:
        assert peer.sent[-1] == {"kind": "watch.target", "boundary": 9}


def test_any_rank_may_want_the_stop_and_twice_is_once() -> None:
    run = Run()
    run.beats(5, boundaries=7)
    run.tell(run.peers[1], "stop_wanted", cause="SIGUSR1", boundaries=7)
    run.tell(run.peers[2], "stop_wanted", cause="SIGUSR2", boundaries=7)
    assert run.coordinator.request_stop("SIGTERM")
    assert [peer.verbs().count("stop") for peer in run.peers] == [1, 1, 1]
    assert run.peers[0].sent[-1]["cause"] == "SIGUSR1"


@pytest.mark.parametrize("leave", ["bye", "lost"])
def test_ranks_that_leave_are_not_waited_for(leave: str) -> None:
    run = Run()
    run.beats(5, boundaries=7)
    run.coordinator.request_stop("SIGTERM")
    run.tell(run.peers[0], "passed", boundary=7)
    run.tell(run.peers[1], "passed", boundary=7)
    run.coordinator.lost(run.peers[2]) if leave == "lost" else run.tell(run.peers[2], "bye")
    assert run.peers[0].sent[-1] == {"kind": "watch.target", "boundary": 8}


def test_before_the_first_step_there_is_nothing_to_stop_at() -> None:
    run = Run()
    run.beats(5, boundaries=0)
    assert not run.coordinator.request_stop("SIGTERM")
    run.tell(run.peers[1], "stop_wanted", cause="SIGUSR1")
    assert run.peers[1].verbs() == ["stop_now"]


def test_commits_are_counted_over_all_rounds_and_old_workers_are_not_heard() -> None:
    run = Run()
    run.tell(run.peers[0], "committed", path="a")
    run.coordinator.start_round(3)
    run.tell(run.peers[0], "committed", path="b")  # of the round before
    assert run.coordinator.commits == 1


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"kind": 3},
        {"kind": "watch.beat", "ticks": "many", "slowest_s": -1, "boundaries": True, "local_s": float("nan")},
        {"kind": "watch.evidence", "question": [1], "evidence": 4},
        {"kind": "watch.passed", "boundary": {}},
        {"kind": "watch.hello", "rank": "0"},
        {"kind": "watch.unknown"},
    ],
)
def test_messages_that_make_no_sense_do_no_harm(message: dict[str, Any]) -> None:
    run = Run()
    run.coordinator.received(run.peers[1], message)
    run.coordinator.received(FakePeer(), message)
    run.wait(1.0)


def test_a_straggler_is_named_once() -> None:
    run = Run()
    for turn in range(60):
        for rank, peer in enumerate(run.peers):
            local = 0.4 if rank == 2 else 0.1
            run.tell(peer, "beat", ticks=turn, boundaries=turn, slowest_s=0.6, step_s=0.6, local_s=local)
        run.now += 0.5
        run.coordinator.tick(run.now)
    assert len(run.said) == 1
    assert "Rank 2" in run.said[0]
    assert "4.0 times" in run.said[0]
