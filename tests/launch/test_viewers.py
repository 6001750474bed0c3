"""People who look on a launch over a connection: who is let in, what they are told, what cannot harm it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lockstep
from cli.calling import check_refused
from lockstep.control import Secret, Server, derived, name_of
from lockstep.errors import ConfigError
from lockstep.launch import (
    MOST_SENTENCES,
    MOST_VIEWERS,
    JobConnection,
    RunViewers,
    connect_here,
    connect_to,
    make_work_folder,
    running_launches,
    write_place,
)
from lockstep.observe.hang import Evidence, SourceLine
from tests.control.oracle import PlainClient
from tests.patching import module_of
from tests.refusals import expect_refusal

RAW = bytes(range(32))
SECRET = Secret(RAW)


class FakeWatch:
    """A watch of two ranks, of which one answers at once."""

    def __init__(self) -> None:
        self.at_answer: Callable[[Evidence], None] = lambda evidence: None
        self.asked: list[str] = []

    def standing(self) -> list[dict[str, object]]:
        return [{"rank": 0, "steps": 7}, {"rank": 1, "steps": 7}]

    def latest(self) -> dict[str, float | str]:
        return {"step": 7, "loss": "nan"}

    def request_stacks(self) -> int:
        self.asked.append("stacks")
        place = SourceLine("train.py", 5, "fetch")
        self.at_answer(Evidence(1, "b", 12, 7, 0.0, place, (), {}, 'File "train.py", line 5\n  fetch()'))
        return 2


class Launch:
    def __init__(self) -> None:
        self.watch = FakeWatch()
        self.stops: list[str] = []
        self.viewers = RunViewers(self.watch, self.stop, "train.py on 1 machine")
        self.server = Server(SECRET, "127.0.0.1", 0, {"top": self.viewers})

    def stop(self, cause: str) -> str:
        self.stops.append(cause)
        return "" if len(self.stops) == 1 else "the run is about to stop already"


@pytest.fixture
def launch() -> Iterator[Launch]:
    found = Launch()
    with found.server:
        yield found


def sentences(connection: JobConnection, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        found += [message["sentence"] for message in connection.news(10)]
    return found


def test_a_viewer_is_told_how_the_launch_stands_and_all_hear_what_is_asked_for(launch: Launch) -> None:
    first, second = JobConnection(launch.server.address, SECRET), JobConnection(launch.server.address, SECRET)
    for connection in (first, second):
        view = connection.look()
        assert view["run"] == "train.py on 1 machine" and view["latest"] == {"step": 7, "loss": "nan"}
        assert [one["rank"] for one in view["ranks"]] == [0, 1] and view["sentences"] == []
    first.ask("stop")
    first.ask("stop")
    asked = ["All ranks stop at the next step boundary."]
    assert sentences(first, 2) == [*asked, "The request was refused: the run is about to stop already."]
    assert sentences(second, 1) == asked
    assert [one["sentence"] for one in first.look()["sentences"]] == asked


def test_stacks_go_to_those_who_asked_for_them(launch: Launch) -> None:
    first, second = JobConnection(launch.server.address, SECRET), JobConnection(launch.server.address, SECRET)
    first.look()
    second.look()
    first.ask("stacks")
    (stack,) = first.news(10)
    assert (stack["kind"], stack["rank"], stack["host"]) == ("top.stack", 1, "b")
    assert stack["place"] == "at train.py:5 in fetch" and "fetch()" in stack["stack"]
    second.look()
    assert second.news(0) == []


def test_another_version_is_refused_with_both_named(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = JobConnection(launch.server.address, SECRET)
    monkeypatch.setattr(lockstep, "__version__", lockstep.__version__)  # as it was, after this test
    monkeypatch.setattr(module_of(connect_to), "lockstep", type("Other", (), {"__version__": "0.9"}))
    with pytest.raises(ConfigError, match=rf"{lockstep.__version__}.*0\.9"):
        connection.look()


def test_there_are_only_so_many_viewers_and_sentences(launch: Launch) -> None:
    connections = [JobConnection(launch.server.address, SECRET) for _ in range(MOST_VIEWERS + 1)]
    for connection in connections[:-1]:
        connection.look()
    expect_refusal(ConfigError, "connected", connections[-1].look)
    for number in range(3 * MOST_SENTENCES):
        launch.server.call(lambda number=number: launch.viewers.say(f"sentence {number}"))
    assert len(connections[0].look()["sentences"]) == MOST_SENTENCES


def test_who_asks_before_looking_is_disconnected(launch: Launch) -> None:
    client = PlainClient(launch.server.address).shake_hands(RAW)
    client.send({"kind": "top.stop"})
    assert client.was_dropped() and launch.stops == []


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=st.dictionaries(st.sampled_from(["kind", "version", "rank", "x"]),
                               st.one_of(st.none(), st.integers(), st.text(max_size=20), st.just("top.look"),
                                         st.just("top.stacks"), st.just("top.stop"))))  # fmt: skip
def test_strange_messages_of_one_viewer_do_not_disturb_another(
    launch: Launch, message: dict[str, Any]
) -> None:
    bystander = JobConnection(launch.server.address, SECRET)
    bystander.look()
    client = PlainClient(launch.server.address).shake_hands(RAW)
    client.send(message)
    client.socket.sendall(os.urandom(64))
    assert bystander.look()["run"] == "train.py on 1 machine" and launch.stops == []
    client.close()
    bystander.close()


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No other launch, and no other secret of this user, is found."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("LOCKSTEP_SECRET", raising=False)
    return tmp_path


def test_the_secret_comes_from_a_file_a_launch_here_a_variable_or_the_users_own(
    launch: Launch, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = launch.server.address
    expect_refusal(ConfigError, "secret", connect_to, address, None)
    shared = Server(derived(SECRET, "launch"), "127.0.0.1", 0, {"top": launch.viewers})
    with shared:
        path = folders / "secret"
        path.write_text(SECRET.hex())
        path.chmod(0o600)
        connect_to(shared.address, str(path)).look()
        monkeypatch.setenv("LOCKSTEP_SECRET", SECRET.hex())
        connect_to(shared.address, None).look()
        monkeypatch.delenv("LOCKSTEP_SECRET")
        (folders / "config" / "lockstep").mkdir(parents=True, mode=0o700)
        path.rename(folders / "config" / "lockstep" / "secret")
        connect_to(shared.address, None).look()
    write_place(make_work_folder(), "id-1", address, "train.py", SECRET)
    connect_to(address, None).look()
    assert connect_here("id-2") is None
    for connection in (connect_here("id-1"), connect_here()):
        assert connection is not None
        connection.look()
    write_place(make_work_folder(), "id-2", ("127.0.0.1", 1), "other.py", SECRET)
    with pytest.raises(ConfigError, match=r"\.py.*\.py"):
        connect_here()


def test_folders_that_others_could_have_made_are_passed_over(folders: Path) -> None:
    good = Path(make_work_folder())
    write_place(str(good), "good", ("127.0.0.1", 5), "train.py", SECRET)
    for name, text in (("torn", '{"launch_id": "torn"'), ("list", "[]"), ("port", '{"address": "a:b"}')):
        bad = Path(make_work_folder())
        write_place(str(bad), name, ("127.0.0.1", 5), "bad.py", SECRET)
        (bad / "launch.json").write_text(text)
    opened = Path(make_work_folder())
    write_place(str(opened), "opened", ("127.0.0.1", 5), "bad.py", SECRET)
    (opened / "control").chmod(0o644)
    (folders / "lockstep-link").symlink_to(good)
    (folders / "lockstep-file").touch()
    assert [one.launch_id for one in running_launches()] == ["good"]


def test_what_cannot_be_reached_is_refused_in_a_sentence(
    launch: Launch, folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refused(capsys, ["top"], "No launch of yours")
    monkeypatch.setenv("LOCKSTEP_SECRET", "00" * 32)
    check_refused(capsys, ["top", name_of(launch.server.address)], "another secret")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        check_refused(capsys, ["top", name_of(unused.getsockname())], "Cannot reach 127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = name_of(other.getsockname())
        monkeypatch.setattr(module_of(connect_to), "CONNECT_S", 0.2)
        check_refused(capsys, ["top", address], "did not answer within")
    check_refused(capsys, ["top", "host:99999"], "host:99999")
    check_refused(capsys, ["top", "--secret-file", str(folders / "none"), "127.0.0.1:5"], "Cannot use")


def test_a_launch_that_is_not_watched_is_refused(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_SECRET", SECRET.hex())
    with Server(derived(SECRET, "launch"), "127.0.0.1", 0, {}) as server:
        check_refused(capsys, ["top", name_of(server.address)], "it is not watched (--no-watch)")
