"""The coordinator with made-up peers, watch and clock; and a launcher's end of it over real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.control import Server, new_secret
from lockstep.errors import ConfigError, ControlError
from lockstep.launch import (
    CAUSE_WAIT_S,
    LOOPBACK,
    CoordinatorLost,
    CoordinatorServer,
    LaunchCoordinator,
    LauncherIdentity,
    LaunchPlan,
    Membership,
    Rendezvous,
    Restarts,
    find_rendezvous_address,
    holder_of,
    join_request_of,
    listening_socket,
)
from tests.patching import module_of

GRACE_S = 30.0


class FakePeer:
    def __init__(self, name: str) -> None:
        self.name = name
        self.data: dict[str, Any] = {}
        self.got: list[Mapping[str, Any]] = []

    def send(self, message: Mapping[str, Any]) -> None:
        self.got.append(message)

    def kinds(self) -> list[str]:
        """What it was told since it was asked last, without heartbeats."""
        kinds = [str(message["kind"]).partition(".")[2] for message in self.got]
        self.got.clear()
        return [kind for kind in kinds if kind != "heartbeat"]


class FakeWatch:
    def __init__(self) -> None:
        self.commits = self.steps = self.ended = 0
        self.nothing_begun = False
        self.gone: list[int] = []
        self.stopped: str | None = None
        self.verdict: Any = None
        self.asked: list[str] = []
        self.reasons: list[tuple[str, str, int | None]] = []
        self.worlds: list[int] = []

    def start_round(self, world_size: int) -> None:
        self.worlds.append(world_size)
        self.verdict = None

    def request_stop(self, cause: str) -> None:
        self.asked.append(cause)

    def left(self, rank: int) -> None:
        self.gone.append(rank)

    def end_all(self, reason: str, sentence: str = "", rank: int | None = None) -> None:
        self.ended += 1
        self.reasons.append((reason, sentence, rank))


class Launch:
    """A coordinator for ``least`` to ``most`` machines a, b, ... and what it said."""

    def __init__(self, least: int, most: int, restarts: int = 9) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.watch = FakeWatch()
        members = Membership(least, most, epoch="this", run="train.py", first="a", now=0.0)
        self.coordinator = LaunchCoordinator(
            members,
            Restarts(restarts),
            self.watch,
            GRACE_S,
            elastic=least < most,
            say=self.said.append,
            clock=lambda: self.now,
        )
        self.peers: dict[str, FakePeer] = {}

    def tell(self, who: str, verb: str, **facts: Any) -> None:
        peer = self.peers.setdefault(who, FakePeer(who))
        self.coordinator.received(peer, {"kind": f"rendezvous.{verb}", **facts})

    def join(self, name: str, epoch: str = "") -> None:
        offer = {"machine": name, "name": f"host-{name}", "run": "train.py", "nproc": 2}
        self.tell(name, "join", **offer, address="10.0.0.1", port=1000, rank=None, epoch=epoch)

    def fail(self, name: str, rank: int, round: int = 0, **facts: Any) -> None:
        facts = {"code": 1, "summary": "exit code 1", "consequence": False, "host": f"host-{name}", **facts}
        self.tell(name, "failed", round=round, rank=rank, **facts)

    def wait(self, seconds: float) -> None:
        deadline = self.now + seconds
        while self.now < deadline:
            self.now += 0.2
            for name in self.peers:
                self.tell(name, "heartbeat")
            self.coordinator.tick(self.now)

    def over(self, name: str = "a") -> Mapping[str, Any]:
        return next(message for message in self.peers[name].got if message["kind"] == "rendezvous.over")


def two_machines(restarts: int = 9) -> Launch:
    launch = Launch(2, 2, restarts)
    launch.join("a")
    launch.join("b")
    assert launch.peers["a"].kinds() == ["admitted", "waiting", "round"]
    assert launch.peers["b"].kinds() == ["admitted", "round"]
    assert launch.watch.worlds == [4]
    return launch


def test_a_failure_ends_the_round_everywhere_and_all_join_the_next() -> None:
    launch = two_machines()
    launch.watch.steps = 12
    launch.fail("b", rank=2, summary="ended by SIGKILL", code=137)
    assert launch.said == [
        "lockstep: restart 1 of 9: rank 2 on host-b failed (ended by SIGKILL) after 12 steps of its round; "
        "resuming."
    ]
    assert launch.peers["a"].kinds() == launch.peers["b"].kinds() == ["end"]
    assert launch.watch.ended == 1
    launch.fail("a", rank=0)  # it lost its peers meanwhile: of a round that is over
    launch.join("a", epoch="this")
    launch.join("b", epoch="this")
    assert launch.peers["b"].kinds() == ["admitted", "round"]
    assert launch.watch.worlds == [4, 4]


@pytest.mark.parametrize("cause_comes", [True, False])
def test_a_rank_that_lost_contact_is_blamed_only_if_nobody_else_can_be(cause_comes: bool) -> None:
    launch = two_machines(restarts=0)
    launch.fail("a", rank=0, consequence=True)
    launch.wait(CAUSE_WAIT_S / 2)
    if cause_comes:
        launch.fail("b", rank=2, code=9)
    else:
        launch.wait(CAUSE_WAIT_S)
    assert launch.over()["rank"] == (2 if cause_comes else 0)


def test_a_newcomer_is_let_in_at_a_step_boundary_and_costs_no_restart() -> None:
    launch = Launch(1, 2)
    launch.watch.steps = 5
    launch.join("a")
    launch.wait(4.0)
    assert launch.peers["a"].kinds() == ["admitted", "round"]
    launch.join("b")
    assert launch.watch.asked == ["a machine that joins"]
    assert launch.peers["a"].kinds() == ["stopping"]
    launch.tell("a", "finished", round=0, code=75)
    assert launch.peers["a"].kinds() == ["end"]
    launch.join("a", epoch="this")
    assert launch.watch.worlds == [2, 4]
    assert not any("restart" in sentence for sentence in launch.said)


def test_a_newcomer_does_not_wait_for_workers_that_cannot_stop_or_take_too_long() -> None:
    for steps, seconds in ((0, 0.0), (5, GRACE_S + 0.5)):
        launch = Launch(1, 2)
        launch.watch.steps = steps
        launch.join("a")
        launch.wait(4.0)
        launch.join("b")
        launch.wait(seconds)
        assert launch.peers["a"].kinds()[-1] == "end"
        assert launch.watch.ended == 1


def test_a_stop_signal_lets_workers_save_and_ends_what_does_not_stop_in_time() -> None:
    launch = two_machines()
    launch.watch.steps = 5
    launch.tell("b", "stop", signal="SIGTERM")
    launch.tell("b", "stop", signal="SIGTERM")
    assert launch.watch.asked == ["SIGTERM"]
    assert launch.peers["a"].kinds() == ["stopping"]
    launch.wait(GRACE_S + 0.4)
    assert launch.over()["code"] == 143
    launch = two_machines()
    launch.tell("b", "stop", signal="SIGUSR1")
    launch.watch.stopped = "all ranks stopped after 5 steps."
    launch.tell("a", "finished", round=0, code=75)
    launch.tell("b", "finished", round=0, code=75)
    assert (launch.over()["code"], launch.over()["cause"]) == (75, "all ranks stopped after 5 steps.")


def test_a_stop_signal_before_the_first_step_ends_with_75_since_there_is_nothing_to_save() -> None:
    launch = two_machines()  # in its first step, which takes longer than the grace period
    launch.watch.steps = 0
    launch.tell("a", "stop", signal="SIGTERM")
    launch.wait(GRACE_S + 0.4)
    assert launch.over()["code"] == 75
    launch = Launch(2, 2)  # which waits for its second machine
    launch.join("a")
    launch.tell("a", "stop", signal="SIGTERM")
    assert launch.over()["code"] == 75


def test_a_hang_that_lasted_too_long_is_a_failure_with_a_code_of_its_own() -> None:
    launch = two_machines(restarts=1)
    launch.watch.verdict = SimpleNamespace(sentence="rank 1 is stopped.")
    launch.wait(0.2)
    assert launch.said == ["lockstep: restart 1 of 1: it hung: rank 1 is stopped; resuming."]
    assert launch.watch.reasons == [("hang", "", None)]
    launch.join("a", epoch="this")
    launch.join("b", epoch="this")
    launch.watch.verdict = SimpleNamespace(sentence="rank 1 is stopped.")
    launch.wait(0.2)
    assert launch.over()["code"] == 124


@pytest.mark.parametrize(
    "wrong", [{"nproc": 0}, {"nproc": True}, {"port": -1}, {"name": 7}, {"run": "x" * 2000}, {"rank": "0"}]
)
def test_an_offer_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    good = {"machine": "a", "name": "a", "run": "r", "nproc": 1, "address": "h", "port": 1, "epoch": ""}
    join_request_of(good)
    with pytest.raises(ControlError):
        join_request_of(good | wrong)


# -- over sockets --------------------------------------------------------------------------------------


class Messages:
    """Sentences, as they are said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)


def nothing() -> None:
    """No upkeep."""


def test_the_host_says_once_whom_it_turns_away() -> None:
    messages = Messages()
    plan = LaunchPlan(command=("true",), nproc=1, num_machines=2, address=LOOPBACK)
    server = CoordinatorServer(plan, new_secret(), LOOPBACK, 0, "first", "train.py", messages)
    with socket.create_connection(server.address) as scanner:  # a client of something else is none
        scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
        scanner.recv(100)
    for _ in range(2):
        with pytest.raises(ConfigError, match="--secret-file"):
            Rendezvous(
                server.address, new_secret(), LauncherIdentity("train.py", 1, None, LOOPBACK), Messages()
            )
    server.close()
    assert messages.lines == [
        "lockstep: 127.0.0.1 was refused: it has another secret. Give every machine the same --secret-file "
        "or LOCKSTEP_SECRET."
    ]


def test_another_program_is_told_from_a_launcher() -> None:
    identity = LauncherIdentity("train.py", 1, None, LOOPBACK)
    with listening_socket(LOOPBACK) as other:
        other.settimeout(10.0)
        address = (LOOPBACK, other.getsockname()[1])

        def greet() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" + b"x" * 100)

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(ConfigError, match="not a Lockstep launcher"):
            Rendezvous(address, new_secret(), identity, Messages())
        thread.join()


def test_a_host_that_is_slow_to_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts and says nothing, or ends the connection, as a busy host does, before it answers."""
    monkeypatch.setattr(module_of(Rendezvous), "CONNECT_S", 0.2)
    secret, kept = new_secret(), []
    with listening_socket(LOOPBACK) as busy:
        busy.settimeout(10.0)
        host, port = busy.getsockname()

        def wake_up() -> None:
            kept.extend(busy.accept()[0] for _ in range(2))
            busy.accept()[0].close()
            busy.close()
            kept.append(Server(secret, host, port, {"rendezvous": Mute()}))
            kept[-1].start()

        waking = threading.Thread(target=wake_up)
        waking.start()
        one = Rendezvous((host, port), secret, LauncherIdentity("r", 1, 1, LOOPBACK), Messages())
        waking.join()
        one.close()
    for other in kept:
        other.close()


def test_nobody_who_answers_is_waited_for_as_long_as_was_said() -> None:
    messages = Messages()
    with listening_socket(LOOPBACK) as taken:
        address = (LOOPBACK, taken.getsockname()[1])
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:\d+ after 1 s"):
        Rendezvous(
            address, new_secret(), LauncherIdentity("r", 1, 1, LOOPBACK), messages, coordinator_limit_s=1.2
        )
    assert time.monotonic() - started < 5.0
    assert len(messages.lines) == 1
    assert "machine 1" in messages.lines[0]
    assert "waits for the machine that hosts the launch" in messages.lines[0]


class Mute:
    """A coordinator whose machine is up, but which says nothing any more."""

    def received(self, peer: Any, message: Mapping[str, Any]) -> None:
        """Nothing."""

    def lost(self, peer: Any) -> None:
        """Nothing."""

    def tick(self, now: float) -> None:
        """Nothing."""


@pytest.mark.parametrize("silent", [True, False])
def test_a_coordinator_that_is_gone_or_silent_is_lost(silent: bool) -> None:
    secret = new_secret()
    with Server(secret, LOOPBACK, 0, {"rendezvous": Mute()}) as server:
        identity = LauncherIdentity("r", 1, 1, LOOPBACK)
        one = Rendezvous(server.address, secret, identity, Messages(), heartbeat_limit_s=0.5)
        if not silent:
            server.close()
        with pytest.raises(CoordinatorLost, match="was silent" if silent else "is gone"):
            one.join(nothing)
        one.close()


def test_addresses_are_resolved_once_and_belong_to_an_interface() -> None:
    meeting = find_rendezvous_address("localhost", 29500, None)
    assert meeting == (LOOPBACK, LOOPBACK, "lo", True)
    assert find_rendezvous_address(LOOPBACK, 29500, "lo") == meeting
    elsewhere = find_rendezvous_address("192.0.2.7", 29500, "lo")
    assert (elsewhere.master, elsewhere.own, elsewhere.here) == ("192.0.2.7", LOOPBACK, False)
    with listening_socket(LOOPBACK) as taken:
        assert holder_of(taken.getsockname()[1]).startswith("pid ")
