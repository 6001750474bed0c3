"""One connection, as a server sees it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from lockstep.control import session
from lockstep.control.secret import Secret
from lockstep.control.session import encode
from lockstep.errors import ControlError

MAX_QUEUED_BYTES = 4 * 1024 * 1024
READ_BYTES = 64 * 1024
HANDSHAKE_S = 5.0


class ControlConnection:
    """Who sent a message; handlers keep in ``data`` what they know of it.

    ``address`` is the other end's host and port.
    """

    def __init__(self, connection: Connection, in_dispatcher: Callable[[Callable[[], None]], None]) -> None:
        self.address = connection.address
        self.data: dict[str, object] = {}
        self._connection = connection
        self._in_dispatcher = in_dispatcher

    def send(self, message: Mapping[str, object]) -> None:
        """Queue a message; from any thread. A peer that is gone, or does not read what it was sent, is dropped.

        Raises:
            ControlError: only if the message is not a mapping of JSON values of at most 1 MiB.
        """
        payload = encode(message)
        self._in_dispatcher(lambda: self._connection.send(payload))

    def close(self) -> None:
        """End the connection, after what was sent before as far as it can leave at once; from any thread."""
        self._in_dispatcher(self._connection.end)

    def __repr__(self) -> str:
        return f"ControlConnection{self.address}"


class Handler(Protocol):
    """What a server does with messages. All calls come from one thread, so a handler needs no locks."""

    def received(self, peer: ControlConnection, message: Mapping[str, object]) -> None:
        """A message whose ``kind`` is ``<this handler's name>.<verb>``."""

    def lost(self, peer: ControlConnection) -> None:
        """A peer that this handler had a message from is gone, or was closed: said once, and last."""

    def tick(self, now: float) -> None:
        """Called every 0.2 s with the time of an ``AwakeClock``."""


class Connection:
    """A socket that never blocks: handshake, then messages in and bounded bytes out.

    ``ended`` is set when nothing more is to be read or written; the server then closes the socket. The server
    is told by ``changed`` when that happens, when the client has proved itself, and when bytes begin to wait.
    """

    def __init__(
        self,
        accepted: socket.socket,
        address: tuple[str, int],
        secret: Secret,
        changed: Callable[[Connection], None],
    ) -> None:
        self.socket = accepted
        self.address = address
        self.ended = False
        self.deadline = time.monotonic() + HANDSHAKE_S
        self.handler_names: dict[str, None] = {}
        self._changed = changed
        self._secret = secret
        self._session: session.Session | None = None
        self._greeted = session.greeting()
        self._answered = b""
        self._outgoing = bytearray()
        self._queue(self._greeted)

    @property
    def authenticated(self) -> bool:
        return self._session is not None

    @property
    def wants_to_write(self) -> bool:
        return bool(self._outgoing)

    def read(self) -> Iterator[dict[str, object]]:
        """The messages that are complete with what arrived.

        Raises:
            ControlError: the other end closed, or its bytes are not those of a client which knows the secret.
            OSError: the connection broke.
        """
        # Of a stranger no byte beyond its answer is read: what follows belongs to a session that does not exist yet.
        limit = READ_BYTES if self.authenticated else session.ANSWER_BYTES - len(self._answered)
        try:
            received = self.socket.recv(limit)
        except BlockingIOError:
            return
        if not received:
            raise ControlError("closed by the other end")
        if self._session is not None:
            yield from self._session.reader.messages(received)
            return
        self._answered += received
        # Refused at the first wrong byte: another protocol may never send the rest of an answer.
        if not session.PROTOCOL.startswith(self._answered[: len(session.PROTOCOL)]):
            raise ControlError("another protocol")
        if len(self._answered) == session.ANSWER_BYTES:
            proof, self._session = session.welcome(self._secret, self._greeted, self._answered)
            self._queue(proof)
            self._changed(self)

    def send(self, payload: bytes) -> None:
        """Queue a payload; a queue that would get too long ends the connection instead."""
        if self.ended or self._session is None:
            return
        frame = self._session.writer.frame(payload)
        # A peer that reads too slowly is dropped: waiting for it would stop the thread that serves all others.
        if len(self._outgoing) + len(frame) > MAX_QUEUED_BYTES:
            self.end()
            return
        self._queue(frame)

    def refuse(self) -> None:
        """Say to a client with another secret that this is final: what it gets is no proof."""
        self._queue(bytes(session.PROOF_BYTES))
        self.end()

    def end(self) -> None:
        self.ended = True
        self._changed(self)

    def flush(self) -> None:
        """Write what can leave now."""
        waited = self.wants_to_write
        try:
            while self._outgoing:
                with memoryview(self._outgoing) as view:
                    count = self.socket.send(view[:READ_BYTES])
                del self._outgoing[:count]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()
            self.end()
        if self.wants_to_write != waited:
            self._changed(self)

    def _queue(self, content: bytes) -> None:
        self._outgoing += content
        # Where earlier bytes wait already, the selector calls ``flush``.
        if len(self._outgoing) == len(content):
            self.flush()
            self._changed(self)
