"""The protocol once more, from its description alone: sockets, ``struct`` and ``hmac``, nothing of ours."""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

from lockstep.control import ControlConnection, Secret, Server

PROTOCOL = b"lockstep link 1\n"


def sign(key: bytes, content: bytes) -> bytes:
    return hmac.new(key, content, "sha256").digest()


def frame(key: bytes, number: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + sign(key, struct.pack(">Q", number) + payload) + payload


class PlainClient:
    """A client that may do anything."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, 5)
        self.number = 0
        self.to_server = self.to_client = b""

    def shake_hands(self, secret: bytes) -> PlainClient:
        greeting = self.exactly(48)
        assert greeting.startswith(PROTOCOL)
        answer = PROTOCOL + os.urandom(32)
        self.socket.sendall(answer + sign(secret, b"client" + greeting + answer))
        assert self.exactly(32) == sign(secret, b"server" + greeting + answer)
        session = sign(secret, b"session" + greeting + answer)
        self.to_server = sign(session, b"lockstep purpose: to server")
        self.to_client = sign(session, b"lockstep purpose: to client")
        return self

    def send(self, message: Any) -> None:
        self.socket.sendall(self.next_frame(json.dumps(message).encode()))

    def next_frame(self, payload: bytes) -> bytes:
        self.number += 1
        return frame(self.to_server, self.number - 1, payload)

    def receive(self, number: int) -> Any:
        header = self.exactly(36)
        payload = self.exactly(struct.unpack(">I", header[:4])[0])
        assert header + payload == frame(self.to_client, number, payload)
        return json.loads(payload)

    def exactly(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            part = self.socket.recv(size - len(received))
            if not part:
                raise EOFError
            received += part
        return received

    def was_dropped(self, within_s: float = 5) -> bool:
        """Whether the server ends the connection in time; what it sends before is thrown away."""
        self.socket.settimeout(within_s)
        try:
            while self.socket.recv(65536):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        self.socket.close()


class Echo:
    """Answers each message with itself, and remembers what happened in which order."""

    def __init__(self) -> None:
        self.messages: list[Mapping[str, Any]] = []
        self.lost_peers: list[ControlConnection] = []
        self.ticks: list[float] = []

    def received(self, peer: ControlConnection, message: Mapping[str, Any]) -> None:
        self.messages.append(message)
        peer.data["messages"] = peer.data.get("messages", 0) + 1
        peer.send({**message, "answered": peer.data["messages"]})

    def lost(self, peer: ControlConnection) -> None:
        self.lost_peers.append(peer)

    def tick(self, now: float) -> None:
        self.ticks.append(now)


@contextmanager
def serving(handler: Any, secret: Secret, host: str = "127.0.0.1") -> Iterator[Server]:
    server = Server(secret, host, handlers={"echo": handler})
    server.start()
    try:
        yield server
    finally:
        server.close()


def comes_true(condition: Callable[[], bool], within_s: float = 5) -> bool:
    deadline = monotonic() + within_s
    while not condition():
        if monotonic() > deadline:
            return False
        sleep(0.01)
    return True
