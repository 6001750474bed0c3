"""A client whose server is absent, foreign, hostile, stuck or gone."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.control import AwakeClock, Client, ControlConnection, Secret
from lockstep.errors import ControlError
from tests.control.oracle import PROTOCOL, Echo, serving, sign
from tests.marks import examples

RAW = bytes(range(32))
SECRET = Secret(RAW)


@contextmanager
def answering(behave: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """A listener that treats its one client as ``behave`` says, and then closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                connection, _ = listener.accept()
                with connection:
                    behave(connection)
            except OSError:
                pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[:2]
        listener.close()


def session_keys(connection: socket.socket) -> tuple[bytes, bytes]:
    """The server's part of the handshake, from its description: keys to the server and to the client."""
    greeting = PROTOCOL + os.urandom(32)
    connection.sendall(greeting)
    answer = connection.recv(80, socket.MSG_WAITALL)
    assert answer[48:] == sign(RAW, b"client" + greeting + answer[:48])
    connection.sendall(sign(RAW, b"server" + greeting + answer[:48]))
    session = sign(RAW, b"session" + greeting + answer[:48])
    return sign(session, b"lockstep purpose: to server"), sign(session, b"lockstep purpose: to client")


@pytest.mark.parametrize(
    ("behave", "said"),
    [
        (lambda connection: None, "ended the connection before it was authenticated"),
        (
            lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4),
            "not a Lockstep launcher",
        ),
        (lambda connection: time.sleep(1), "did not answer within 0.3 s"),
        (lambda connection: connection.sendall(PROTOCOL), "ended the connection"),
        (lambda connection: connection.sendall(PROTOCOL + bytes(64)), "has another secret"),
    ],
)
def test_what_is_no_server_that_knows_the_secret_is_refused(behave: Any, said: str) -> None:
    with answering(behave) as address:
        with pytest.raises(ControlError, match=said) as caught:
            Client(address, SECRET, 0.3)
    assert f"127.0.0.1:{address[1]}" in str(caught.value)


def test_the_client_proves_nothing_that_a_wrong_server_could_send_on() -> None:
    """What a wrong server sends back as its own proof is the client's own words."""

    def reflect(connection: socket.socket) -> None:
        connection.sendall(PROTOCOL + bytes(32))
        connection.sendall(connection.recv(80, socket.MSG_WAITALL)[48:])

    with answering(reflect) as address, pytest.raises(ControlError, match="secret"):
        Client(address, SECRET, 5)


@examples(30)
@given(st.binary(min_size=1, max_size=300))
def test_garbage_after_the_handshake_ends_the_link(content: bytes) -> None:
    def garble(connection: socket.socket) -> None:
        session_keys(connection)
        connection.sendall(content)

    with answering(garble) as address, Client(address, SECRET, 5) as client:
        with pytest.raises(ControlError):
            client.receive(5)
        with pytest.raises(ControlError):
            client.send({})


def test_nobody_there_is_said_with_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for address in (
        ("127.0.0.1", port),
        ("127.0.0.1", 70_000),
        ("no such host", 1),
        ("a\0b", 1),
        ("a" * 99, 1),
    ):
        with pytest.raises(ControlError, match=f":{address[1]}"):
            Client(address, SECRET, 2)


def test_receive_gives_none_in_time_and_what_comes_later_afterwards() -> None:
    peers: list[ControlConnection] = []

    class Late(Echo):
        def received(self, peer: ControlConnection, message: Mapping[str, Any]) -> None:
            peers.append(peer)

    with serving(Late(), SECRET) as server, Client(server.address, SECRET, 5) as client:
        client.send({"kind": "echo.x"})
        began = time.monotonic()
        assert client.receive(0) is None and client.receive(0.2) is None
        assert 0.15 < time.monotonic() - began < 5
        threading.Timer(0.2, lambda: peers[0].send({"now": 1})).start()
        assert client.receive(None) == {"now": 1}


def test_a_message_that_cannot_be_sent_leaves_the_link_as_it_was() -> None:
    with serving(Echo(), SECRET) as server, Client(server.address, SECRET, 5) as client:
        for message in ({"a": object()}, {"a": "x" * 2**20}, {"a": float("nan")}):
            with pytest.raises(ControlError):
                client.send(message)
        client.send({"kind": "echo.ask"})
        assert client.receive(5) == {"kind": "echo.ask", "answered": 1}


def test_a_server_that_reads_nothing_does_not_hold_the_sender_for_ever() -> None:
    def ignore(connection: socket.socket) -> None:
        session_keys(connection)
        time.sleep(10)

    with answering(ignore) as address:
        client = Client(address, SECRET, 0.5)
        began = time.monotonic()
        with pytest.raises(ControlError, match=r"0\.5 s"):
            for _ in range(100):
                client.send({"filler": "x" * 900_000})
        assert time.monotonic() - began < 8
        with pytest.raises(ControlError):
            client.send({})


def test_several_threads_send_whole_messages() -> None:
    with serving(Echo(), SECRET) as server, Client(server.address, SECRET, 10) as client:

        def send(number: int) -> None:
            for i in range(20):
                client.send({"kind": "echo.ask", "who": number, "i": i, "filler": "x" * 20_000})

        threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        answers = [client.receive(10) or {} for _ in range(80)]
        for thread in threads:
            thread.join()
        for number in range(4):
            assert [one["i"] for one in answers if one["who"] == number] == list(range(20))
        assert [one["answered"] for one in answers] == list(range(1, 81))


def test_pauses_do_not_count_and_time_in_small_pieces_does() -> None:
    now = [1000.0]
    clock = AwakeClock(lambda: now[0])
    for _ in range(50):
        now[0] += 0.2
        seen = clock()
    assert abs(seen - 10.0) < 1e-6
    now[0] += 3600.0  # it was suspended for an hour
    assert clock() - seen == 1.0
    now[0] = 0.0  # a clock that goes back
    assert clock() - seen == 1.0
    now[0] += 0.5
    assert abs(clock() - seen - 1.5) < 1e-6
