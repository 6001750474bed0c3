"""What both ends of a connection share: sockets, a handshake in which they prove that they know the secret, frames.

::

    server -> client   protocol | server's nonce
    client -> server   protocol | client's nonce | HMAC(secret, "client", both)
    server -> client   HMAC(secret, "server", both)
    frames             length (4 bytes) | MAC (32 bytes) | JSON object

Each session has keys of its own, one a direction, since each end contributes a fresh nonce. The MAC (HMAC-SHA256)
covers the number of the frame and its payload, so that a frame that is changed, repeated, left out, reordered or sent
back is refused. Frames are authentic, not encrypted.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn, Protocol

from lockstep.control.secret import Secret, derived
from lockstep.errors import ConfigError, ControlError

BACKLOG = 1024


class HoldsSockets(Protocol):
    """Whoever must let go of its sockets in a forked child."""

    def _close_in_child(self) -> None: ...


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on this address alone, and does not block.

    Raises:
        ConfigError: the host is not an address of this machine, or the port is taken or not allowed.
    """
    where = name_of((host, port))
    if not host:
        raise ConfigError(
            "The address to listen on is empty, which would mean all addresses. Name one address."
        )
    # The system would take the remainder.
    if not 0 <= port <= 65535:
        raise ConfigError(f"Cannot listen on {where}: ports are 0 to 65535. Correct the port.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family, backlog=BACKLOG)
    except (OSError, OverflowError, ValueError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port} of {host} is taken by another process. Choose another port, or end that process."
            ) from None
        raise ConfigError(
            f"Cannot listen on {where}: {reason_of(error)}. Name an address of this machine and a port that may "
            f"be used."
        ) from None
    listener.setblocking(False)
    return listener


def tune(connection: socket.socket) -> None:
    """Small messages leave at once; a machine that vanished is noticed, but not one that stands still for a while."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def close_after_fork(holder: HoldsSockets) -> None:
    """Have a forked child close its copies: the other end must see the loss when this process ends."""
    reference = weakref.ref(holder)

    def close_copies() -> None:
        alive = reference()
        if alive is not None:
            alive._close_in_child()

    os.register_at_fork(after_in_child=close_copies)


def name_of(address: tuple[str, int]) -> str:
    """Return the address as ``host:port`` for a message."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reason_of(error: Exception) -> str:
    """Return what happened, for a message: the system's words without its error number."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).rstrip(".")


MAX_PAYLOAD_BYTES = 1024 * 1024
MAC_BYTES = 32
LENGTH = struct.Struct(">I")
NUMBER = struct.Struct(">Q")
HEADER_BYTES = LENGTH.size + MAC_BYTES


def encode(message: Mapping[str, object]) -> bytes:
    """Return the payload of a message.

    Raises:
        ControlError: the message is not a mapping of JSON values, or larger than 1 MiB.
    """
    if not isinstance(message, Mapping):
        raise ControlError(
            f"A message is a mapping, not {type(message).__name__}. Put the value under a key."
        )
    try:
        payload = json.dumps(dict(message), allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ControlError(
            f"The message has values that JSON cannot hold: {type(error).__name__}. Send numbers, text, lists "
            "and mappings only."
        ) from None
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ControlError(
            f"The message has {len(payload)} bytes, more than {MAX_PAYLOAD_BYTES}. Send less, or several messages."
        )
    return payload


def decode(payload: bytes) -> dict[str, object]:
    """Return the message of a payload.

    Raises:
        ControlError: the payload is not one JSON object.
    """
    try:
        message = json.loads(payload, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        # Not JSON, not UTF-8, thousands of digits, nested too deep.
        message = None
    if not isinstance(message, dict):
        raise ControlError(
            "A message from the other process is not a JSON object. Use the same version of Lockstep on all "
            "machines."
        )
    return message


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


class FrameWriter:
    """Makes the frames of one direction, in order."""

    def __init__(self, key: Secret) -> None:
        self._key = key
        self._number = 0

    def frame(self, payload: bytes) -> bytes:
        """Return the next frame, around a payload of :func:`encode`."""
        # The number is signed and not sent: both ends count, so that a frame fits in one place of the stream only.
        mac = self._key.sign(NUMBER.pack(self._number) + payload)
        self._number += 1
        return LENGTH.pack(len(payload)) + mac + payload


class FrameReader:
    """Takes the bytes of one direction, in order, and gives messages."""

    def __init__(self, key: Secret) -> None:
        self._key = key
        self._number = 0
        self._received = bytearray()

    def messages(self, received: bytes) -> Iterator[dict[str, object]]:
        """Yield the messages that are complete with these bytes; the rest waits for the next call.

        Raises:
            ControlError: a frame is oversize, not authentic, out of order, or not a JSON object. The reader
                is of no use afterwards.
        """
        self._received += received
        while len(self._received) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received)
            # The length is not authentic yet: without a bound, someone in between could have this side wait for 4 GiB.
            if length > MAX_PAYLOAD_BYTES:
                raise ControlError(
                    f"The other process announced a message of {length} bytes, more than {MAX_PAYLOAD_BYTES}. "
                    "Connect again."
                )
            end = HEADER_BYTES + length
            if len(self._received) < end:
                return
            mac = bytes(self._received[LENGTH.size : HEADER_BYTES])
            payload = bytes(self._received[HEADER_BYTES:end])
            del self._received[:end]
            # In constant time, and before the payload is parsed: JSON of strangers is never read.
            if not hmac.compare_digest(mac, self._key.sign(NUMBER.pack(self._number) + payload)):
                raise ControlError("A message was changed, repeated or reordered on its way. Connect again.")
            self._number += 1
            yield decode(payload)


PROTOCOL = b"lockstep link 1\n"
NONCE_BYTES = PROOF_BYTES = 32
GREETING_BYTES = len(PROTOCOL) + NONCE_BYTES
ANSWER_BYTES = GREETING_BYTES + PROOF_BYTES


class Session(NamedTuple):
    """One end of an authenticated connection."""

    reader: FrameReader
    writer: FrameWriter


class OtherSecretError(ControlError):
    """A client speaks this protocol, with another secret."""


def greeting() -> bytes:
    """Return what a server says first; fresh for each connection."""
    return PROTOCOL + secrets.token_bytes(NONCE_BYTES)


def answer(secret: Secret, greeted: bytes) -> bytes:
    """Return the client's answer to a greeting.

    Raises:
        ControlError: the greeting is of another protocol.
    """
    if len(greeted) != GREETING_BYTES or not greeted.startswith(PROTOCOL):
        raise ControlError("what answers there is not a Lockstep launcher of this version")
    mine = greeting()
    # Over both nonces, so that a proof is good for this connection alone.
    return mine + secret.sign(b"client" + greeted + mine)


def welcome(secret: Secret, greeted: bytes, answered: bytes) -> tuple[bytes, Session]:
    """Return the server's proof and session, for a client whose answer is right.

    Raises:
        OtherSecretError: the answer is not that of a client which knows the secret.
    """
    theirs, proof = answered[:GREETING_BYTES], answered[GREETING_BYTES:]
    if not hmac.compare_digest(proof, secret.sign(b"client" + greeted + theirs)):
        raise OtherSecretError("the client does not know the secret")
    to_server, to_client = _keys(secret, greeted, theirs)
    return secret.sign(b"server" + greeted + theirs), Session(FrameReader(to_server), FrameWriter(to_client))


def finish(secret: Secret, greeted: bytes, answered: bytes, proof: bytes) -> Session:
    """Return the client's session, when the server's proof is right.

    Raises:
        ControlError: the server does not know the secret.
    """
    mine = answered[:GREETING_BYTES]
    if not hmac.compare_digest(proof, secret.sign(b"server" + greeted + mine)):
        raise ControlError("what answers there has another secret")
    to_server, to_client = _keys(secret, greeted, mine)
    return Session(FrameReader(to_client), FrameWriter(to_server))


def _keys(secret: Secret, greeted: bytes, answered: bytes) -> tuple[Secret, Secret]:
    # A key for each direction, so that nobody can send a frame back to who has made it.
    session = Secret(secret.sign(b"session" + greeted + answered))
    return derived(session, "to server"), derived(session, "to client")
