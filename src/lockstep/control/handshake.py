"""How two ends prove that they know the secret, and agree on the keys of one session.

::

    server -> client   protocol | server's nonce
    client -> server   protocol | client's nonce | HMAC(secret, "client", both)
    server -> client   HMAC(secret, "server", both)

Each session has keys of its own, one a direction, since each end contributes a fresh nonce.
"""

from __future__ import annotations

import hmac
import secrets
from typing import NamedTuple

from lockstep.control.frames import FrameReader, FrameWriter
from lockstep.control.secret import Secret, derived
from lockstep.errors import LinkError

PROTOCOL = b"lockstep link 1\n"
NONCE_BYTES = PROOF_BYTES = 32
GREETING_BYTES = len(PROTOCOL) + NONCE_BYTES
ANSWER_BYTES = GREETING_BYTES + PROOF_BYTES


class Session(NamedTuple):
    """One end of an authenticated connection."""

    reader: FrameReader
    writer: FrameWriter


class OtherSecretError(LinkError):
    """A client speaks this protocol, with another secret."""


def greeting() -> bytes:
    """What a server says first; fresh for each connection."""
    return PROTOCOL + secrets.token_bytes(NONCE_BYTES)


def answer(secret: Secret, greeted: bytes) -> bytes:
    """The client's answer to a greeting.

    Raises:
        LinkError: the greeting is of another protocol.
    """
    if len(greeted) != GREETING_BYTES or not greeted.startswith(PROTOCOL):
        raise LinkError("what answers there is not a Lockstep launcher of this version")
    mine = greeting()
    return mine + secret.sign(b"client" + greeted + mine)


def welcome(secret: Secret, greeted: bytes, answered: bytes) -> tuple[bytes, Session]:
    """The server's proof and session, for a client whose answer is right.

    Raises:
        OtherSecretError: the answer is not that of a client which knows the secret.
    """
    theirs, proof = answered[:GREETING_BYTES], answered[GREETING_BYTES:]
    if not hmac.compare_digest(proof, secret.sign(b"client" + greeted + theirs)):
        raise OtherSecretError("the client does not know the secret")
    to_server, to_client = _keys(secret, greeted, theirs)
    return secret.sign(b"server" + greeted + theirs), Session(FrameReader(to_server), FrameWriter(to_client))


def finish(secret: Secret, greeted: bytes, answered: bytes, proof: bytes) -> Session:
    """The client's session, when the server's proof is right.

    Raises:
        LinkError: the server does not know the secret.
    """
    mine = answered[:GREETING_BYTES]
    if not hmac.compare_digest(proof, secret.sign(b"server" + greeted + mine)):
        raise LinkError("what answers there does not know the run's secret")
    to_server, to_client = _keys(secret, greeted, mine)
    return Session(FrameReader(to_client), FrameWriter(to_server))


def _keys(secret: Secret, greeted: bytes, answered: bytes) -> tuple[Secret, Secret]:
    session = Secret(secret.sign(b"session" + greeted + answered))
    return derived(session, "to server"), derived(session, "to client")
