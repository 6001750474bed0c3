"""The coordinator alone: messages and times are invented, nothing sleeps."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lockstep.observe.hang import (
    Coordinator,
    Evidence,
    HangJudge,
    PendingCollective,
    ProcessState,
    SourceLine,
    WatchSettings,
    machine_of_process,
)
from tests.patching import module_of


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
            here = {"host": platform.node(), "pid": os.getpid(), "machine": machine_of_process()}
            self.tell(peer, "hello", rank=rank, world_size=world_size, **here)

    def tell(self, peer: FakePeer, verb: str, **values: Any) -> None:
        self.coordinator.received(peer, {"kind": f"watch.{verb}", **values})

    def heartbeats(
        self,
        ticks: int,
        boundaries: int = 1,
        slowest_s: float = 0.1,
        but: tuple[int, ...] = (),
        part: str = "",
    ) -> None:
        told = {"ticks": ticks, "boundaries": boundaries, "slowest_s": slowest_s, "part": part}
        for rank, peer in enumerate(self.peers):
            if rank not in but:
                self.tell(peer, "heartbeat", **told)

    def wait(self, seconds: float, ticks: int = 1, but: tuple[int, ...] = (), **heartbeat: Any) -> None:
        """Time passes in ticks of 0.2 s, with heartbeats that tell of no progress; ``answer`` answers questions."""
        for _ in range(round(seconds / 0.2)):
            self.now += 0.2
            self.heartbeats(ticks, but=but, **heartbeat)
            self.coordinator.tick(self.now)
            for rank, peer in enumerate(self.peers):
                for message in peer.sent:
                    if message["kind"] == "watch.explain" and not message.get("answered") and rank not in but:
                        message["answered"] = True
                        self.tell(peer, "evidence", question=message["question"], evidence=self.answer(rank))

    def answer(self, rank: int) -> dict[str, Any]:
        here = SourceLine("train.py", 57, "main") if rank != 1 else SourceLine("data.py", 88, "slow_fetch")
        pending = (
            (PendingCollective("all_reduce", 412, "default", "[4]", "float32", here),) if rank != 1 else ()
        )
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
        run.tell(run.peers[ticks % 3], "heartbeat", ticks=ticks, boundaries=1)
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


def test_ranks_in_different_collectives_never_meet_so_that_the_run_ends_soon() -> None:
    run = Run(2, hang_timeout_s=300.0)
    answers_with(run, in_different_collectives)
    run.wait(9.0)
    assert len(run.said) == 1 and "Call Accelerator.save_state on every rank" in run.said[0]
    assert run.coordinator.verdict is None  # it is looked at once more
    run.wait(3.0)
    assert run.coordinator.verdict is not None
    assert run.coordinator.verdict.cause == "mismatch"
    assert run.coordinator.verdict.sentence in run.said[0]


def test_ranks_that_seem_to_wait_in_a_circle_have_their_time() -> None:
    """On a busy machine answers of different moments look like one."""
    run = Run(2, hang_timeout_s=60.0)
    answers_with(run, lambda rank: in_different_collectives(rank, number=412 + rank, group=str(rank)))
    run.wait(40.0)
    assert len(run.said) == 1 and "wait for each other" in run.said[0]
    assert run.coordinator.verdict is None
    run.wait(21.0)
    assert run.coordinator.verdict is not None


def test_a_mismatch_that_was_none_at_the_second_look_has_its_time() -> None:
    run = Run(2, hang_timeout_s=60.0)
    answers_with(run, in_different_collectives)
    run.wait(8.0)
    assert len(run.said) == 1
    answers_with(run, lambda rank: collective_of(rank, waits=rank == 0))
    run.wait(60.0)
    assert run.coordinator.verdict is None  # one of them has got on
    run.wait(15.0)
    assert run.coordinator.verdict is not None


@pytest.mark.parametrize("is_counted", [True, False])
def test_collectives_that_advance_are_progress_though_no_step_is_made(is_counted: bool) -> None:
    """A long ``prepare`` broadcasts thousands of tensors, one after the other, and no loop ticks meanwhile."""
    run = Run(2)
    run.heartbeats(0, boundaries=0)
    looked = [0, 0]

    def advancing(rank: int) -> Evidence:
        looked[rank] += 1
        found = in_different_collectives(0, number=412 + looked[rank], group="default")
        pending = (replace(found.pending[0], number=None if not is_counted else found.pending[0].number),)
        return replace(found, rank=rank, pending=pending, stack=f"prepare.py:{looked[rank]}")

    answers_with(run, advancing)
    run.wait(400.0, ticks=0, boundaries=0)
    assert run.said == []
    assert run.coordinator.verdict is None
    answers_with(run, in_different_collectives)
    run.wait(70.0, ticks=0, boundaries=0)
    assert len(run.said) == 1  # now it stands still


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_rank_that_gets_no_processor_is_slow_and_not_stuck(
    monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    run = Run(2)
    waited_s, gets_one = 0.0, False

    def waits() -> float:
        nonlocal waited_s
        waited_s = run.now if not gets_one else waited_s
        return waited_s

    monkeypatch.setattr(module_of(HangJudge), "process_state", lambda pid: ProcessState("running", waits()))
    answers_with(run, lambda rank: replace(in_different_collectives(rank), waited_s=waits() if rank else 0.0))
    silent = (1,) if is_silent else ()
    run.wait(120.0, but=silent)
    assert run.said == []
    gets_one = True
    run.wait(15.0, but=silent)
    assert len(run.said) == 1
    assert ("never releases Python's lock" if is_silent else "different collectives") in run.said[0]


def test_a_process_is_looked_up_on_the_machine_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts and process ids may be equal on several machines, as in pods."""
    monkeypatch.setattr(module_of(HangJudge), "process_state", lambda pid: ProcessState("stopped"))
    run = Run(3)
    answers_with(run, collective_of)
    for rank in (1, 2):
        run.tell(
            run.peers[rank], "hello", rank=rank, host=platform.node(), pid=os.getpid() + 1, machine="other"
        )
    run.heartbeats(1)
    run.wait(12.0, but=(1,))
    assert "rank 1 does not answer" in run.said[0]
    assert "stopped" not in run.said[0]


def test_when_nobody_waits_for_another_nothing_is_said_for_long() -> None:
    """All ranks compute: mostly an evaluation without prepared loaders, or a long save."""
    run = Run()
    answers_with(run, lambda rank: collective_of(rank, waits=False))
    run.wait(55)
    assert run.said == []
    run.wait(15)
    assert len(run.said) == 1


# What ranks that have passed 7 boundaries do, or pass, and at which boundary they stop.
STOPS: dict[str, tuple[list[tuple[int, str | int]], int]] = {
    "all are there": ([(0, "stop"), (0, 7), (2, 8), (1, 7)], 9),
    "rank 2 leaves with a word": ([(0, "stop"), (0, 7), (1, 7), (2, "bye"), (2, "lost")], 8),
    "rank 2 leaves, seen by its launcher": ([(0, "stop"), (0, 7), (1, 7), (2, "left"), (2, "lost")], 8),
    "a connection is lost before": ([(2, "lost"), (2, "hello"), (0, "stop"), (0, 7), (1, 9), (2, 7)], 10),
    "a connection is lost after": ([(0, "stop"), (0, 7), (1, 9), (2, 7), (2, "lost"), (2, "hello"), (2, 7)], 10),
    "in between": ([(2, "lost"), (0, "stop"), (0, 7), (1, 9), (2, "hello"), (2, 7)], 10),
}  # fmt: skip


@pytest.mark.parametrize("name", STOPS)
def test_ranks_stop_at_the_first_boundary_that_none_of_them_passed(name: str) -> None:
    events, boundary = STOPS[name]
    run = Run()
    run.heartbeats(5, boundaries=7)
    for rank, what in events:
        if what == "stop":
            run.coordinator.request_stop("SIGTERM")
        elif what == "lost":
            run.coordinator.lost(run.peers[rank])
        elif what == "left":
            run.coordinator.left(rank)
        elif isinstance(what, int):
            run.tell(run.peers[rank], "passed", boundary=what)
        else:
            run.peers[rank] = FakePeer() if what == "hello" else run.peers[rank]
            here = {"host": platform.node(), "pid": os.getpid(), "world_size": 3}
            run.tell(run.peers[rank], what, rank=rank, **here)
    for peer in run.peers[: 2 if "leaves" in name else 3]:
        stop, target = (one for one in peer.sent if one["kind"] in ("watch.stop", "watch.target"))
        assert (stop["cause"], target["boundary"]) == ("SIGTERM", boundary)
    assert not run.coordinator.nothing_begun


def test_what_is_known_of_a_rank_outlives_its_connection_and_a_lost_one_has_begun() -> None:
    run = Run(2)
    run.heartbeats(5, boundaries=7)
    for peer in run.peers:
        run.coordinator.lost(peer)
    assert run.coordinator.steps == 7
    run.coordinator.request_stop("SIGTERM")
    assert not run.coordinator.nothing_begun  # nobody is known, but somebody was
    run.peers = [FakePeer(), FakePeer()]
    for rank, peer in enumerate(run.peers):
        run.tell(peer, "hello", rank=rank, world_size=2, host=platform.node(), pid=os.getpid())
        run.tell(peer, "passed", boundary=8, steps=8)
    assert [peer.sent[-1] for peer in run.peers] == [{"kind": "watch.target", "boundary": 9}] * 2


@pytest.mark.parametrize("asked_by", ["launcher", "rank"])
def test_before_anything_has_begun_all_end_at_once_with_nothing_to_save(asked_by: str) -> None:
    run = Run()
    run.heartbeats(0, boundaries=0)
    if asked_by == "launcher":
        run.coordinator.request_stop("SIGTERM")
    else:
        run.tell(run.peers[1], "stop_wanted", cause="SIGUSR1", boundaries=0, steps=0)
    for peer in run.peers:
        assert not run.coordinator.nothing_begun
        run.tell(peer, "passed", boundary=0, steps=0)
    assert run.coordinator.nothing_begun
    assert [peer.verbs() for peer in run.peers] == [["stop", "stop_now"]] * 3


def test_a_stop_within_the_first_step_is_made_at_its_end() -> None:
    """The heartbeat that told of no progress is older than the answer."""
    run = Run()
    run.heartbeats(0, boundaries=0)
    run.coordinator.request_stop("SIGTERM")
    for rank, peer in enumerate(run.peers):
        run.tell(peer, "passed", boundary=0, steps=1 if rank == 2 else 0)
    assert not run.coordinator.nothing_begun
    assert run.peers[0].sent[-1] == {"kind": "watch.target", "boundary": 1}


def test_a_stop_before_any_rank_is_there_has_nothing_to_save_either() -> None:
    coordinator = Coordinator(WatchSettings(), lambda sentence: None)
    coordinator.start_round(2)
    coordinator.request_stop("SIGTERM")
    assert coordinator.nothing_begun


def collective_of(rank: int, done: int = 411, waits: bool = True, **more: Any) -> Evidence:
    """A rank in all_reduce #412, or, if it does not wait, in its own work."""
    here = SourceLine("train.py", 57, "main")
    pending = (PendingCollective("all_reduce", 412, "default", "[4]", "float32", here),) if waits else ()
    return Evidence(
        rank, platform.node(), 1, 3, 5.0, here, pending, {"default": done}, "", waits=waits, **more
    )


def in_different_collectives(rank: int, **more: Any) -> Evidence:
    """Rank 0 alone in ``save_state``."""
    call = "Accelerator.save_state" if rank == 0 else "Accelerator.backward"
    one = collective_of(rank, call=call)
    return replace(one, pending=(replace(one.pending[0], operation=f"operation_{rank}", **more),))


def answers_with(run: Run, answer: Any) -> None:
    run.answer = lambda rank: answer(rank).to_message()  # type: ignore[method-assign]


# What rank 1, and then rank 0, tell the coordinator after training, before rank 0 exports alone for an hour.
ENDINGS = {
    "end_training, rank 1 exits": [
        (1, "ending"),
        (0, "ending"),
        (1, "done"),
        (0, "done"),
        (1, "bye"),
        (1, "lost"),
    ],
    "end_training, rank 1 lives on": [(1, "ending"), (0, "ending"), (0, "done"), (1, "done")],
    "rank 1 waits in end_training": [(1, "ending")],
    "no end_training, rank 1 exits": [(1, "bye"), (1, "lost")],
    "rank 1 exits without a word": [(1, "lost")],
    "rank 1 exits without a word, seen by its launcher": [(1, "lost"), (1, "left")],
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_rank_that_works_alone_after_training_is_left_alone(ending: str, is_silent: bool) -> None:
    run = Run(2, hang_timeout_s=20.0)
    run.wait(1.0)
    for rank, verb in ENDINGS[ending]:
        if verb == "lost":
            run.coordinator.lost(run.peers[rank])
        elif verb == "left":
            run.coordinator.left(rank)
        else:
            run.tell(run.peers[rank], verb, ticks=1, evidence=collective_of(rank, waits=False).to_message())
    # rank 1, where it is still there, waits in the barrier of end_training
    answers_with(run, lambda rank: collective_of(rank, waits=rank == 1, call="Accelerator.end_training"))
    out = {rank for rank, verb in ENDINGS[ending] if verb == "lost"}
    run.wait(600.0, but=tuple({0} if is_silent else set()) + tuple(out))
    assert run.said == []
    assert run.coordinator.verdict is None


@pytest.mark.parametrize("how", ["bye", "left", "done"])
def test_a_rank_that_ended_while_others_wait_is_named_with_what_they_wait_for(how: str) -> None:
    run = Run(2, hang_timeout_s=20.0)
    run.wait(1.0)
    if how == "left":
        run.coordinator.lost(run.peers[1])
        run.coordinator.left(1)
    else:
        run.tell(run.peers[1], how, ticks=1, evidence=collective_of(1, waits=False).to_message())
    answers_with(
        run,
        lambda rank: collective_of(rank, waits=rank == 0, call="Accelerator.save_state" if rank == 0 else ""),
    )
    run.wait(5.0, but=() if how == "done" else (1,))
    words = {"bye": "has ended", "left": "has ended with exit code 0", "done": "has called end_training"}[how]
    assert run.said[0].startswith(
        f"rank 1 {words}, and rank 0 waits for it in all_reduce #412 (Accelerator.save_state) at train.py:57. "
        "Call Accelerator.save_state on every rank, before any of them ends. "
    )
    run.wait(20.0, but=() if how == "done" else (1,))
    assert run.coordinator.verdict is not None
    assert run.coordinator.verdict.cause == "ended"


def test_a_rank_that_entered_a_collective_before_it_ended_is_not_waited_for() -> None:
    run = Run(2)
    run.wait(1.0)
    run.tell(run.peers[1], "bye", evidence=collective_of(1, done=412, waits=False).to_message())
    answers_with(run, lambda rank: collective_of(rank))
    run.wait(30.0, but=(1,))
    assert run.said == []


def test_answers_from_before_a_rank_ended_are_not_judged_with_its_end() -> None:
    """On a busy machine rank 0 was in a collective, went on, and rank 1 ended before rank 0 sent a heartbeat again."""
    run = Run(2)
    run.wait(1.0)
    run.now += 6.0
    run.coordinator.tick(run.now)
    asked = next(message for message in run.peers[0].sent if message["kind"] == "watch.explain")
    early = collective_of(0).to_message()
    run.tell(run.peers[0], "evidence", question=asked["question"], evidence=early)
    run.tell(run.peers[1], "bye", evidence=collective_of(1, done=411, waits=False).to_message())
    run.coordinator.tick(run.now + 0.2)
    assert run.said == []


def test_ranks_that_all_wait_for_data_are_named_but_never_ended() -> None:
    run = Run(2, hang_timeout_s=20.0)
    place = SourceLine("train.py", 50, "main", "waiting for its data-loader workers (pid 13)")
    answers_with(run, lambda rank: Evidence(rank, platform.node(), 1, 3, 5.0, place, (), {}, ""))
    run.wait(300.0)
    assert len(run.said) == 1
    assert run.coordinator.verdict is None


def test_a_rank_that_starts_slowly_is_not_named_before_the_limit_of_a_start() -> None:
    run = Run()
    run.wait(59.0, ticks=1, boundaries=0)
    assert run.said == []
    run.wait(3.0, ticks=1, boundaries=0)
    assert len(run.said) == 1
    assert "No rank has made progress for 6" in run.said[0]


@pytest.mark.parametrize(
    ("ticks", "part", "is_named"),
    [
        (3, "inference", True),
        (9, "data", True),
        (3, "backward", False),
        (9, "forward", False),
        (2, "data", False),
    ],
)
def test_a_hang_of_an_evaluation_is_named_like_that_of_a_training(
    ticks: int, part: str, is_named: bool
) -> None:
    run = Run()
    run.wait(4.8, ticks=ticks, boundaries=0, part=part)
    assert len(run.said) == is_named


def test_a_rank_that_comes_while_the_others_are_asked_is_progress() -> None:
    said: list[str] = []
    coordinator = Coordinator(WatchSettings(startup_s=0.0), said.append)
    coordinator.start_round(2)
    first, second, now = FakePeer(), FakePeer(), 100.0
    coordinator.tick(now)
    hello = {"kind": "watch.hello", "world_size": 2, "host": platform.node(), "pid": os.getpid()}
    coordinator.received(first, {**hello, "rank": 0})
    while "explain" not in first.verbs():
        now += 0.2
        coordinator.tick(now)
    coordinator.received(second, {**hello, "rank": 1})
    number = first.sent[-1]["question"]
    for peer, rank in ((first, 0), (second, 1)):
        evidence = collective_of(rank, waits=rank == 0).to_message()
        coordinator.received(peer, {"kind": "watch.evidence", "question": number, "evidence": evidence})
    coordinator.tick(now + 0.2)
    assert said == []


def test_ranks_that_come_at_once_in_a_later_round_have_not_been_idle_since_the_clock_began() -> None:
    run = Run(2)
    run.coordinator.start_round(2)
    for rank, peer in enumerate(run.peers):  # before the coordinator looks at the time
        run.tell(peer, "hello", rank=rank, world_size=2, host=platform.node(), pid=os.getpid())
    run.wait(59.0, ticks=0, boundaries=0)
    assert run.said == []
    run.wait(3.0, ticks=0, boundaries=0)
    assert "No rank has made progress for 6" in run.said[0]


def test_ranks_that_never_come_together_are_named_before_the_first_step() -> None:
    """They do not start slowly: they are in collectives of which neither can end."""
    run = Run(2)
    answers_with(run, in_different_collectives)
    run.wait(5.0, boundaries=0)
    assert "different collectives" in run.said[0]


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
        {
            "kind": "watch.heartbeat",
            "ticks": "many",
            "slowest_s": -1,
            "boundaries": True,
            "local_s": float("nan"),
        },
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


def test_a_rank_that_has_failed_is_left_time_to_end_before_others_are_said_to_hang() -> None:
    run = Run(hang_timeout_s=2)
    run.wait(2)
    run.tell(run.peers[1], "bye", failed=True, evidence=run.answer(1))
    run.wait(14, but=(1,))
    assert run.said == [] and run.coordinator.verdict is None
    run.wait(10, but=(1,))  # its process does not end
    assert "rank 1 has failed" in run.said[0]
    assert run.coordinator.verdict is not None
