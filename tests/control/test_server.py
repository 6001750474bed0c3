"""A server among good, slow, silent, hostile and dying clients."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.control import MAX_QUEUED_BYTES, Client, ControlConnection, Secret, Server, new_secret
from lockstep.errors import ConfigError, ControlError
from tests.control.oracle import Echo, PlainClient, comes_true, frame, serving
from tests.refusals import expect_refusal

RAW = bytes(range(32))
SECRET = Secret(RAW)


def ask(client: Client, text: str) -> Any:
    client.send({"kind": "echo.ask", "text": text})
    return client.receive(5)


def test_messages_go_both_ways_with_a_client_that_knows_only_the_description() -> None:
    echo = Echo()
    with serving(echo, SECRET) as server:
        client = PlainClient(server.address).shake_hands(RAW)
        for number in range(3):
            client.send({"kind": "echo.ask", "n": number})
            assert client.receive(number) == {"kind": "echo.ask", "n": number, "answered": number + 1}
        assert len(echo.lost_peers) == 0
        client.close()
        assert comes_true(lambda: len(echo.lost_peers) == 1)
        assert echo.lost_peers[0].data == {"messages": 3} and echo.lost_peers[0].address[0] == "127.0.0.1"


@pytest.mark.parametrize("secret", [new_secret(), Secret(b"")])
def test_without_the_secret_nobody_is_heard(secret: Secret) -> None:
    echo = Echo()
    with serving(echo, SECRET) as server:
        expect_refusal(ControlError, "secret", Client, server.address, secret, 5)
        # the right form without the right proof, with frames sent ahead, as if it had been accepted
        client = PlainClient(server.address)
        client.exactly(48)
        client.socket.sendall(b"lockstep link 1\n" + bytes(64) + frame(RAW, 0, b'{"kind":"echo.ask"}'))
        assert client.was_dropped()
        assert echo.messages == [] and echo.lost_peers == []


def test_a_recorded_session_cannot_be_played_again() -> None:
    echo = Echo()
    with serving(echo, SECRET) as server:
        honest = PlainClient(server.address)
        said: list[bytes] = []
        send = honest.socket.sendall
        honest.socket = type("Recorder", (), {"recv": honest.socket.recv, "close": honest.socket.close})()
        honest.socket.sendall = lambda content: (said.append(content), send(content))  # type: ignore[method-assign]
        honest.shake_hands(RAW).send({"kind": "echo.ask"})
        assert honest.receive(0)["answered"] == 1
        replay = PlainClient(server.address)
        for content in said:
            replay.socket.sendall(content)
        assert replay.was_dropped() and len(echo.messages) == 1


@pytest.mark.parametrize("how", ["repeated", "skipped", "tampered", "other direction", "oversize"])
def test_frames_that_are_not_authentic_end_that_connection_alone(how: str) -> None:
    echo = Echo()
    with serving(echo, SECRET) as server, Client(server.address, SECRET, 5) as bystander:
        client = PlainClient(server.address).shake_hands(RAW)
        payload = b'{"kind":"echo.ask"}'
        good = client.next_frame(payload)
        client.socket.sendall(good)
        assert client.receive(0)["answered"] == 1
        bad = {
            "repeated": good,
            "skipped": frame(client.to_server, 2, payload),
            "tampered": frame(client.to_server, 1, payload)[:-1] + b"]",
            "other direction": frame(client.to_client, 1, payload),
            "oversize": (2**20 + 1).to_bytes(4, "big"),
        }[how]
        client.socket.sendall(bad)
        assert client.was_dropped() and comes_true(lambda: len(echo.lost_peers) == 1)
        assert len(echo.messages) == 1 and ask(bystander, "still here")["answered"] == 1


@pytest.mark.parametrize(
    "payload",
    [b"[]", b"1", b"nonsense", b"\xff\xfe", b"{}", b'{"kind":1}', b'{"kind":"echo"}', b'{"kind":"echo."}',
     b'{"kind":"other.ask"}', b'{"kind":".ask"}', b'{"kind":null}', b"[" * 100_000, b""],
)  # fmt: skip
def test_an_authentic_frame_that_is_no_message_for_a_handler_ends_the_connection(payload: bytes) -> None:
    echo = Echo()
    with serving(echo, SECRET) as server:
        client = PlainClient(server.address).shake_hands(RAW)
        client.socket.sendall(client.next_frame(payload))
        assert client.was_dropped() and echo.messages == []


def test_silent_connections_are_dropped_after_five_seconds_and_meanwhile_block_nobody() -> None:
    echo = Echo()
    with serving(echo, SECRET) as server:
        began = time.monotonic()
        silent = [PlainClient(server.address) for _ in range(120)]
        half = PlainClient(server.address)
        half.exactly(48)
        half.socket.sendall(b"lockstep link 1\n" + bytes(20))
        cut = PlainClient(server.address).shake_hands(RAW)
        # Then killed in the middle of a frame.
        cut.socket.sendall(cut.next_frame(b'{"kind":"echo.ask"}')[:-5])
        with Client(server.address, SECRET, 5) as client:
            assert ask(client, "first")["answered"] == 1
            assert time.monotonic() - began < 4.5  # before their time is over
        # Reset, as by a process that was killed.
        cut.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        cut.close()
        for one in [*silent, half]:
            assert one.was_dropped(15)
        assert 4.5 < time.monotonic() - began < 20
        assert len(echo.messages) == 1 and len(echo.lost_peers) == 1  # the others were never anybody


def test_a_flood_of_strangers_keeps_out_neither_clients_nor_takes_every_descriptor() -> None:
    with serving(Echo(), SECRET) as server:
        strangers = []
        for _ in range(300):
            strangers.append(PlainClient(server.address))
        assert strangers[0].was_dropped(2)  # the oldest ones made room
        with Client(server.address, SECRET, 5) as client:
            assert ask(client, "served")["text"] == "served"
        for one in strangers:
            one.close()


class Flooding(Echo):
    """Sends a peer who asks for it more than any queue holds."""

    def received(self, peer: ControlConnection, message: Mapping[str, Any]) -> None:
        if message["kind"] != "echo.flood":
            super().received(peer, message)
            return
        for _ in range(1000):
            peer.send({"filler": "x" * 64_000})
            self.most_queued = max(
                getattr(self, "most_queued", 0), peer.writer.transport.get_write_buffer_size()
            )


def test_a_reader_too_slow_is_dropped_at_a_bounded_queue_and_blocks_nobody() -> None:
    handler = Flooding()
    with serving(handler, SECRET) as server, Client(server.address, SECRET, 5) as bystander:
        slow = PlainClient(server.address).shake_hands(RAW)
        slow.send({"kind": "echo.flood"})
        began = time.monotonic()
        assert comes_true(lambda: len(handler.lost_peers) == 1)
        assert 0 < handler.most_queued <= MAX_QUEUED_BYTES
        assert ask(bystander, "served")["answered"] == 1 and time.monotonic() - began < 10
        assert slow.was_dropped()


class Faulty(Echo):
    def received(self, peer: ControlConnection, message: Mapping[str, Any]) -> None:
        if message["kind"] == "echo.fail":
            raise KeyError(message["text"])
        super().received(peer, message)

    def tick(self, now: float) -> None:
        super().tick(now)
        raise ZeroDivisionError


def test_an_exception_in_a_handler_is_logged_without_the_message_and_ends_its_sender_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handler = Faulty()
    with serving(handler, SECRET) as server, Client(server.address, SECRET, 5) as bystander:
        with Client(server.address, SECRET, 5) as client:
            client.send({"kind": "echo.fail", "text": "confidential"})
            expect_refusal(ControlError, "closed", client.receive, 5)
        assert ask(bystander, "served")["answered"] == 1
        assert comes_true(lambda: len(handler.ticks) > 2 and len(handler.lost_peers) == 1)
    assert "KeyError at test_server.py:" in caplog.text and "ZeroDivisionError" in caplog.text
    assert "confidential" not in caplog.text


def test_all_handlers_are_called_in_one_thread_which_also_ticks_and_runs_calls() -> None:
    seen: set[int] = set()

    class Watching(Echo):
        def received(self, peer: ControlConnection, message: Mapping[str, Any]) -> None:
            seen.add(threading.get_ident())
            peer.close()

        def lost(self, peer: ControlConnection) -> None:
            super().lost(peer)
            seen.add(threading.get_ident())

        def tick(self, now: float) -> None:
            super().tick(now)
            seen.add(threading.get_ident())

    one, other = Watching(), Watching()
    server = Server(SECRET, "127.0.0.1", handlers={"one": one, "other": other})
    with pytest.raises(ControlError):
        server.call(lambda: 1)
    with server:
        for kind in ("one.x", "other.x"):
            client = Client(server.address, SECRET, 5)
            client.send({"kind": kind})
            with pytest.raises(ControlError):
                client.receive(5)
        assert server.call(threading.get_ident) not in {threading.get_ident()}
        seen.add(server.call(threading.get_ident))
        assert server.call(lambda: server.call(lambda: 41) + 1) == 42
        with pytest.raises(ZeroDivisionError):
            server.call(lambda: 1 // 0)
        assert comes_true(lambda: len(one.ticks) >= 6)
    assert len(seen) == 1 and len(one.lost_peers) == len(other.lost_peers) == 1
    steps = [b - a for a, b in zip(one.ticks, one.ticks[1:], strict=False)]
    assert 0.15 < sorted(steps)[len(steps) // 2] < 1
    with pytest.raises(ControlError):
        server.call(lambda: 1)
    server.close()


# -- addresses ---------------------------------------------------------------------------------------


def listening(port: int) -> set[str]:
    """The addresses on which this process listens at this port."""
    sockets = psutil.Process().net_connections()
    return {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN and one.laddr.port == port}


def test_the_server_listens_on_the_named_address_alone() -> None:
    with serving(Echo(), SECRET, "127.0.0.2") as server:
        assert server.address[0] == "127.0.0.2" and listening(server.address[1]) == {"127.0.0.2"}
        with pytest.raises(ControlError):
            Client(("127.0.0.1", server.address[1]), SECRET, 2)
        Client(server.address, SECRET, 2).close()
    assert listening(server.address[1]) == set()


def test_a_taken_port_an_address_of_elsewhere_and_no_address_are_refused() -> None:
    with serving(Echo(), SECRET) as server:
        with pytest.raises(ConfigError, match=f"Port {server.address[1]}"):
            Server(SECRET, *server.address)
    Server(SECRET, *server.address).close()  # free again at once
    for host, port in (
        ("192.0.2.1", 0),
        ("", 0),
        ("no such host", 0),
        ("127.0.0.1", 70_000),
        ("a\0b", 0),
        ("a" * 99, 0),
    ):
        with pytest.raises(ConfigError):
            Server(SECRET, host, port)


# -- processes ---------------------------------------------------------------------------------------

FORKING = """
import os, sys, time
from lockstep.control import Client, Secret, Server
from lockstep.errors import ControlError
from tests.control.oracle import Echo

secret = Secret(bytes(range(32)))
server = Server(secret, "127.0.0.1", handlers={"echo": Echo()})
server.start()
other = Client((sys.argv[1], int(sys.argv[2])), secret, 5)
other.send({"kind": "echo.ask"})
other.receive(5)
inside = Client(server.address, secret, 5)
ready, answer = os.pipe()
child = os.fork()
if child == 0:
    inherited = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")]
    tables = open("/proc/net/tcp").read() + open("/proc/net/tcp6").read()
    sockets = sum("eventpoll" in name or name.startswith("socket") and name[8:-1] in tables for name in inherited)
    for attempt in (lambda: server.call(int), lambda: other.send({"kind": "echo.ask"}), lambda: inside.receive(1)):
        try:
            attempt()
            sockets += 100
        except ControlError:
            pass
    os.write(answer, b"%d\\n" % sockets)
    time.sleep(60)
    os._exit(0)
print(server.address[1], child, os.read(ready, 100).decode().strip(), flush=True)
inside.send({"kind": "echo.ask"})
assert inside.receive(5)["answered"] == 1  # the child closed its copies, not the connections
other.send({"kind": "echo.ask"})
assert other.receive(5)["answered"] == 2
print("works", flush=True)
time.sleep(60)
"""


def test_a_forked_child_neither_answers_nor_keeps_the_connections_of_a_dead_parent() -> None:
    echo = Echo()
    with serving(echo, SECRET) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", FORKING, server.address[0], str(server.address[1])],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        child = 0
        try:
            port, child, inherited = map(int, process.stdout.readline().split())
            assert inherited == 0
            assert process.stdout.readline() == "works\n"
            client = Client(("127.0.0.1", port), SECRET, 5)
            process.kill()
            assert comes_true(lambda: len(echo.lost_peers) == 1, 10)
            with pytest.raises(ControlError):
                client.receive(10)
            assert listening(port) == set()
            os.kill(child, 0)  # the child lives on
        finally:
            process.kill()
            process.wait()
            if child:
                os.kill(child, signal.SIGKILL)


def test_sources_use_no_pickle() -> None:
    import lockstep.control

    for file in Path(lockstep.control.__file__).parent.glob("*.py"):
        assert not re.search(
            r"^\s*(import|from)\s+(pickle|marshal|shelve|multiprocessing)", file.read_text(), re.M
        )
