"""The rendezvous as a pure state machine: no sockets, no processes, and a clock that the test makes up."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from lockstep.launch import (
    HEARTBEAT_LIMIT_S,
    JOIN_LIMIT_S,
    LAST_CALL_S,
    JoinRefused,
    JoinRequest,
    JoinTimeout,
    Membership,
    MembershipAction,
    NodeEnded,
    NodeLost,
    NodeWaiting,
    Phase,
    RoundCompleted,
    RoundStarted,
)

RUN = "train.py on 4 machines"
SEQUENCES, EVENTS = 2_000, 25


def request(machine: str, rank: int | None = None, nproc: int = 1, **other: str) -> JoinRequest:
    return JoinRequest(
        machine=machine,
        name=f"host-{machine}",
        run=other.get("run", RUN),
        nproc=nproc,
        address=f"10.0.0.{ord(machine[0])}",
        port=1000 + ord(machine[0]),
        rank=rank,
        epoch=other.get("epoch", ""),
    )


def launch(least: int, most: int, now: float = 0.0) -> Membership:
    return Membership(least, most, epoch="this", run=RUN, first="a", now=now)


def only(actions: list[MembershipAction]) -> MembershipAction:
    assert len(actions) == 1, actions
    return actions[0]


def formed(actions: list[MembershipAction]) -> RoundStarted:
    found = [action for action in actions if isinstance(action, RoundStarted)]
    assert len(found) == 1, actions
    return found[0]


def names(round: RoundStarted) -> list[str]:
    return [node.request.machine for node in round.nodes]


def test_a_round_begins_at_once_when_all_are_here_and_ranks_follow_machine_ranks() -> None:
    members = launch(3, 3)
    assert members.join(request("c", 2, nproc=2), 100.0) == []
    assert members.join(request("a", 0, nproc=3), 101.0) == []
    assert members.lacking() == "machine 1"
    round = formed(members.join(request("b", 1), 102.0))
    assert names(round) == ["a", "b", "c"]
    assert [node.base_rank for node in round.nodes] == [0, 3, 4]
    assert (round.number, round.world_size) == (0, 6)
    assert (round.address, round.port) == (request("a").address, request("a").port)


def test_a_first_round_waits_for_late_comers_once_there_are_enough() -> None:
    members = launch(2, 4)
    assert members.lacking() == "2 more machines"
    members.join(request("a"), 0.0)
    assert members.lacking() == "1 more machine"
    assert members.join(request("b"), 10.0) == []
    assert members.tick(10.0 + LAST_CALL_S - 0.1) == []
    assert members.join(request("c"), 10.0 + LAST_CALL_S - 0.05) == []
    assert names(formed(members.tick(10.0 + LAST_CALL_S))) == ["a", "b", "c"]


def test_too_few_survivors_wait_for_another_machine_and_give_up_in_the_end() -> None:
    members = launch(2, 2)
    members.join(request("a", 0), 0.0)
    members.join(request("b", 1), 0.0)
    members.lose("b", 1.0)
    assert members.join(request("a", 0, epoch="this"), 2.0) == []
    now = 2.0
    while now < JOIN_LIMIT_S:
        now += 1.0
        assert members.heartbeat("a", now) == members.tick(now) == []
    members.heartbeat("a", now + 2)
    overdue = only(members.tick(now + 2))
    assert isinstance(overdue, JoinTimeout)
    assert (
        overdue.sentence
        == f"machine 1 did not come within {JOIN_LIMIT_S:.0f} s. Start it, or fewer machines."
    )


@pytest.mark.parametrize(
    ("newcomer", "words", "later"),
    [
        (request("c", epoch="an earlier one"), "earlier launch", False),
        (
            request("c", run="other.py on 4 machines"),
            "is train.py on 4 machines, but here it is other.py",
            False,
        ),
        (request("c", rank=0), "machine_rank 0 is taken by host-a", True),
        (request("c", rank=2), "too large for 2 machines", False),
        (request("c"), "all 2 machines have joined already", True),
    ],
)
def test_who_does_not_belong_here_is_refused_with_the_reason(
    newcomer: JoinRequest, words: str, later: bool
) -> None:
    members = launch(1, 2)
    members.join(request("a", 0), 0.0)
    members.join(request("b", 1), 0.0)
    refused = only(members.join(newcomer, 1.0))
    assert isinstance(refused, JoinRefused)
    assert words in refused.sentence
    assert refused.later is later
    assert "c" not in members.members


def test_a_silent_machine_is_dead_by_the_clock_of_the_receiver_alone() -> None:
    members = launch(1, 2)
    members.join(request("a"), 0.0)
    members.join(request("b"), 0.0)
    now = 0.0
    while now < 1.25 * HEARTBEAT_LIMIT_S:
        now += 0.5
        assert members.heartbeat("a", now) == members.tick(now) == []
    missing = members.tick(now + 0.1)[0]
    assert isinstance(missing, NodeLost)
    assert (missing.request.machine, missing.from_round) == ("b", 0)
    assert "silent for 38 s" in missing.why


def test_the_launcher_in_whose_process_the_coordinator_runs_is_never_lost_for_its_silence() -> None:
    members = launch(1, 1)
    members.join(request("a"), 0.0)
    assert members.tick(3600.0) == []
    assert members.tick(0.0) == []  # a clock that goes back


class Machine:
    """A simulated launcher: what it believes, and what it would say next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.connected = False
        self.running: int | None = None
        self.cut_off = False  # the network between it and the coordinator is down


def invariants(members: Membership, least: int, most: int) -> None:
    round = members.round
    inside = {name for name, one in members.members.items() if one.phase in (Phase.RUNNING, Phase.FINISHED)}
    assert len(members.members) <= most
    if round is None:
        assert not inside
        return
    nodes = [node.request.machine for node in round.nodes]
    assert inside == set(nodes), "a machine is dead and in a round, or in another round than this one"
    assert len(set(nodes)) == len(nodes)
    assert least <= len(nodes) <= most
    assert nodes[0] == "a"
    assert [node.group_rank for node in round.nodes] == list(range(len(nodes)))
    ranks = [node.base_rank + local for node in round.nodes for local in range(node.request.nproc)]
    assert ranks == list(range(round.world_size))


def play(seed: int) -> int:
    """One random history; how many rounds it had. Every action is checked against what it may be."""
    choose = random.Random(seed)
    least = choose.randint(1, 3)
    most = choose.randint(least, 4)
    now = choose.choice([0.0, 1e6, -50.0])
    members = launch(least, most, now)
    machines = {name: Machine(name) for name in "abcde"}
    open_rounds: list[int] = []

    def apply(actions: list[MembershipAction]) -> None:
        for action in actions:
            if isinstance(action, RoundStarted):
                assert not open_rounds, "two rounds at once"
                assert all(one.running is None for one in machines.values() if one.connected)
                open_rounds.append(action.number)
                for node in action.nodes:
                    machines[node.request.machine].running = action.number
            elif isinstance(action, (NodeEnded, RoundCompleted)):
                assert open_rounds == [action.number]
                open_rounds.clear()
            elif isinstance(action, NodeWaiting):
                assert open_rounds == [action.number]
            elif isinstance(action, NodeLost):
                machines[action.request.machine].connected = False
        invariants(members, least, most)

    def join(one: Machine) -> None:
        one.connected, one.running = True, None
        apply(
            members.join(
                request(
                    one.name,
                    nproc=1 + ord(one.name) % 2,
                    epoch=choose.choice(["", "", "", "this", "this", "old"]),
                ),
                now,
            )
        )
        one.connected = one.name in members.members

    moves: list[Callable[[Machine], None]] = [
        join,
        join,
        lambda one: apply(members.lose(one.name, now)),
        lambda one: apply(members.finish(one.name, choose.randint(0, members.rounds), now)),
        lambda one: apply(members.fail(choose.randint(0, members.rounds), now)),
        lambda one: setattr(one, "cut_off", not one.cut_off),
    ]
    for name in choose.sample("abcde", choose.randint(0, 4)):
        join(machines[name])
    for _ in range(EVENTS):
        now += choose.choice([0.0, 0.2, 1.0, 1.0, 1.9, 30.0, -5.0])
        for one in machines.values():
            if one.connected and not one.cut_off:
                apply(members.heartbeat(one.name, now))
                if one.running is not None and one.running not in open_rounds and choose.random() < 0.8:
                    join(one)  # it was told that its round is over
        apply(members.tick(now))
        if choose.random() < 0.7:
            choose.choice(moves)(choose.choice(list(machines.values())))
    return members.rounds


def test_two_thousand_random_histories_never_break_an_invariant() -> None:
    rounds = [play(seed) for seed in range(SEQUENCES)]
    assert sum(rounds) > SEQUENCES  # the histories are not idle
    assert max(rounds) >= 5
